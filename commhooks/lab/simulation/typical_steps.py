"""Chooses a few steps whose weighted mean stands for the whole training."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.base import CommHook
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare
from commhooks.lab.simulation.fake_group import FakeGroup
from reducer import GradBucket

__all__ = ["sent_bytes", "typical_steps", "usual_ratio", "with_arrivals"]

_WINDOW = 1000
_MOST_KINDS = 8
_LATE, _PERIODS = 100_000, 240  # steps after all warm-ups; a multiple of usual periods


def typical_steps(
    hook: CommHook, buckets: Sequence[GradBucket], size: int, first: int
) -> dict[int, float]:
    """Return one step of each kind, from step ``first`` on, with the share of steps of its kind.

    Two steps are of one kind if the cost formula of the hook gives the same bytes for both:
    ``local_sgd`` with a period of 8 has two kinds. If there are many kinds, as in a warm-up, steps
    at equal distances stand for all of them. A hook without a formula gets two consecutive steps,
    because some hooks alternate.
    """
    kinds: dict[tuple[int | None, ...], int] = {}
    counts: Counter[int] = Counter()
    for step in range(first, first + _WINDOW):
        sent = sent_bytes(hook, buckets, size, step)
        if None in sent:
            return {first: 0.5, first + 1: 0.5}
        counts[kinds.setdefault(sent, step)] += 1
    if len(counts) > _MOST_KINDS:
        distance = _WINDOW // _MOST_KINDS
        return {first + i * distance: 1 / _MOST_KINDS for i in range(_MOST_KINDS)}
    return {step: count / _WINDOW for step, count in counts.items()}


def with_arrivals(
    kinds: Mapping[int, float], arrivals: Mapping[int, int], sent: Callable[[int], Any]
) -> dict[int, float]:
    """Add steps that take the result of an exchange and do not send, so they seem to be quiet.

    ``arrivals``: for each kind of step that begins exchanges, the step in which they are awaited.
    ``sent`` returns what the cost formula says about a step.
    """
    shares = dict(kinds)
    for step, arrival in arrivals.items():
        like = next((other for other in kinds if sent(other) == sent(arrival)), step)
        if like != step and shares[like] > kinds[step]:
            shares[like] -= kinds[step]
            shares[arrival] = kinds[step]
    return shares


def sent_bytes(
    hook: CommHook, buckets: Sequence[GradBucket], size: int, step: int
) -> tuple[int | None, ...]:
    """Return the bytes that a rank sends for each bucket in a step, by the cost formula."""
    return tuple(hook.wire_bytes(bucket_with(b, b.buffer(), step=step), size) for b in buckets)


def usual_ratio(name: str, size: int = 8, edge: int = 1024) -> float | None:
    """Return the bytes of plain averaging divided by those of a hook with its default options.

    For a square matrix on ``size`` ranks, after all warm-ups, by the cost formula of the hook; None
    if it has no formula or cannot be made by its name.
    """
    matrix = torch.zeros(edge, edge)
    bucket = GradBucket(matrix.view(-1), [nn.Parameter(matrix)], ["weight"])
    steps = range(_LATE, _LATE + _PERIODS)
    try:
        hook = create(name)
        prepare(hook, {"weight": matrix}, cast("dist.ProcessGroup", FakeGroup(size)), {})
        sent = [sent_bytes(hook, [bucket], size, step)[0] for step in steps]
    except Exception:  # other packages' hooks may raise anything
        return None
    known = [count for count in sent if count is not None]
    if len(known) < len(sent) or not any(known):
        return None
    return all_reduce_bytes(matrix.nbytes, size) * len(steps) / sum(known)
