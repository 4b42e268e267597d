"""Runs a hook alone, on real gradients, to learn what it awaits and how long it works in between.

The hook itself is the model of the hook: whatever is registered, also by others, can be simulated
without a line about it anywhere. It runs in a world of clones (clones.py), which can be of any
size; see docs/design/2026-11-21-simulation.md for why not on meta tensors, or from a table.
"""

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.costs.step_trace import Collective, Members
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.hook.registry import create
from commhooks.lab.simulation.fake_group import CloneChannel, CloneGroup
from commhooks.lab.simulation.typical_steps import at_step, typical_steps
from reducer import GradBucket

__all__ = ["Part", "as_launched", "rehearse"]

_REPEATS = range(3, 5)
"""Of which the first one warms up: memory is allocated, and state made. More than the fewest only
while that takes no longer than the seconds below."""
_SECONDS = 2.0
_EVICTING_ELEMENTS = 1 << 24  # 64 MiB
"""Other buckets, and backward, have had the caches since a hook last saw its bucket."""


@dataclass(frozen=True)
class Part:
    """A hook's work on one bucket. Seconds before, between and after the collectives."""

    local_seconds: tuple[float, ...]
    collectives: tuple[Collective, ...]


def rehearse(
    config: Mapping[str, Any],
    buckets: Sequence[GradBucket],
    parameters: Mapping[str, Tensor],
    *,
    size: int,
    ranks_per_node: int = 1,
    first_step: int = 1000,
    is_timed: bool = True,
) -> list[tuple[float, list[Part]]]:
    """The parts of all buckets, for every kind of step that there is, with its share of the steps.

    ``buckets``: of one step, in order, whose gradients stay as they are; the hook may write to
    ``parameters``, by name. Seconds are the shortest of a few runs, zeros unless ``is_timed``.
    Raises CommHookError if the hook cannot work with this model, with ``size`` ranks or in this
    way.
    """
    with as_launched(ranks_per_node), torch.no_grad():
        hook = create(config)
        hook.prepare(parameters, cast("dist.ProcessGroup", CloneGroup(size)))
        scratch = torch.zeros(_EVICTING_ELEMENTS if is_timed else 0)
        steps = typical_steps(hook, buckets, size, first_step)
        runs: list[list[list[Part]]] = []
        end = time.monotonic() + _SECONDS
        while _is_wanted(len(runs), end, is_timed=is_timed):
            parts = [
                _rehearse_step(hook, buckets, step, size, ranks_per_node, scratch) for step in steps
            ]
            runs.append(parts)
    del hook
    gc.collect()  # what it kept may be as large as the model, and there are more sizes to come
    choose = _fastest if is_timed else _untimed
    return [
        (
            share,
            [choose(parts) for parts in zip(*(run[i] for run in runs[1:] or runs), strict=True)],
        )
        for i, share in enumerate(steps.values())
    ]


def _is_wanted(count: int, end: float, *, is_timed: bool) -> bool:
    """Another run, after so many."""
    if not is_timed:
        return count == 0
    return count < _REPEATS.start or (count < _REPEATS.stop - 1 and time.monotonic() < end)


def _rehearse_step(
    hook: CommHook,
    buckets: Sequence[GradBucket],
    step: int,
    size: int,
    ranks_per_node: int,
    scratch: Tensor,
) -> list[Part]:
    copies = (at_step(b, b.buffer().clone(), len(buckets), step) for b in buckets)
    return [_run(hook, copy, size, ranks_per_node, scratch) for copy in copies]


def _run(
    hook: CommHook, bucket: GradBucket, size: int, ranks_per_node: int, scratch: Tensor
) -> Part:
    comm = Communicator(
        cast("dist.ProcessGroup", CloneGroup(size)),
        step=bucket.step,
        key=bucket.key,
        seed=getattr(hook, "seed", 0),
    )
    run = hook.reduce(bucket, comm)
    local: list[float] = []
    collectives: list[Collective] = []
    seconds = 0.0
    while True:
        scratch.add_(1)
        start = time.perf_counter()
        try:
            request = run.send(None)
        except StopIteration:
            local.append(seconds + time.perf_counter() - start)
            return Part(tuple(local), tuple(collectives))
        except CommHookError:
            raise
        except Exception as error:
            raise CommHookError(
                f"hook {hook!r} cannot be simulated: among {size} ranks that all hold the same "
                f"gradients it raised {type(error).__name__}: {error}"
            ) from error
        seconds += time.perf_counter() - start
        members = len(request.members) or size
        if members == 1:
            continue  # nothing is sent; the work goes on
        local.append(seconds)
        seconds = 0.0
        channel = CloneChannel(members)
        request.start(cast("dist.ProcessGroup", channel))
        collectives.append(
            Collective(
                request.operation,
                channel.tensor_bytes,
                Members.of(request.members, size, ranks_per_node),
            )
        )


def _fastest(parts: Sequence[Part]) -> Part:
    if len({len(part.collectives) for part in parts}) > 1:
        return parts[-1]  # what it sends depends on its state; the last run has the most of that
    local = zip(*(part.local_seconds for part in parts), strict=True)
    return Part(tuple(min(seconds) for seconds in local), parts[-1].collectives)


def _untimed(parts: Sequence[Part]) -> Part:
    return Part(tuple(0.0 for _ in parts[-1].local_seconds), parts[-1].collectives)


@contextmanager
def as_launched(ranks_per_node: int) -> Iterator[None]:
    """As a launcher would have started rank 0; hooks that group ranks by node ask for that."""
    names = {"LOCAL_WORLD_SIZE": str(ranks_per_node), "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
