"""Runs a hook alone, on real gradients, to see what it awaits and how long it works in between.

The hook is its own model, so that hooks of other packages can be simulated as well, without any
line about them here. It runs in a fake group of any size (fake_group.py). The design note
docs/design/2026-11-21-simulation.md compares this with meta tensors and with a table of costs.
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
from commhooks.comm.exchange import Exchange
from commhooks.costs.step_trace import Collective, Members
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, Role
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare
from commhooks.lab.simulation.fake_group import FakeGroup, FakeStageGroup
from commhooks.lab.simulation.typical_steps import typical_steps
from reducer import GradBucket

__all__ = ["HookTrace", "as_launched", "dry_run"]

_FEWEST, _MOST, _SECONDS = 3, 4, 2.0
"""Timed runs; no more than the fewest after the seconds. The first one warms up: it allocates
memory and makes the hook's state."""
_EVICTING_ELEMENTS = 1 << 24  # 64 MiB
"""In training, other buckets and backward use the caches before a hook sees its bucket again."""


@dataclass(frozen=True)
class HookTrace:
    """A hook's work on one bucket. Seconds are before, between and after the collectives."""

    local_seconds: tuple[float, ...]
    collectives: tuple[Collective, ...]


def dry_run(
    config: Mapping[str, Any],
    buckets: Sequence[GradBucket],
    parameters: Mapping[str, Tensor],
    roles: Mapping[str, Role] | None = None,
    *,
    size: int,
    ranks_per_node: int = 1,
    first_step: int = 1000,
    is_timed: bool = True,
) -> list[tuple[float, list[HookTrace]]]:
    """Trace the hook on all buckets, once for each kind of step, with the share of such steps.

    ``buckets`` are those of one step, in order; their gradients are not changed. The hook may write
    to ``parameters``, which are given by name, as are their ``roles``. Seconds are the shortest of
    a few runs, or zeros unless ``is_timed``.

    Raises CommHookError if the hook does not work with this model or with ``size`` ranks, or if it
    fails in a fake group.
    """
    with as_launched(ranks_per_node), torch.no_grad():
        hook = create(config)
        prepare(hook, parameters, cast("dist.ProcessGroup", FakeGroup(size)), roles)
        scratch = torch.zeros(_EVICTING_ELEMENTS if is_timed else 0)
        steps = typical_steps(hook, buckets, size, first_step)

        runs: list[list[list[HookTrace]]] = []
        end = time.monotonic() + _SECONDS
        fewest, most = (_FEWEST, _MOST) if is_timed else (1, 1)
        while len(runs) < fewest or (len(runs) < most and time.monotonic() < end):
            run = []
            for step in steps:
                copies = (bucket_with(b, b.buffer().clone(), step=step) for b in buckets)
                run.append([_trace(hook, b, size, ranks_per_node, scratch) for b in copies])
            runs.append(run)
    del hook
    gc.collect()  # its state may be as large as the model, and other sizes follow
    choose = _fastest if is_timed else _untimed
    return [
        (share, [choose(traces) for traces in zip(*of_step, strict=True)])
        for share, *of_step in zip(steps.values(), *(runs[1:] or runs), strict=True)
    ]


def _trace(
    hook: CommHook, bucket: GradBucket, size: int, ranks_per_node: int, scratch: Tensor
) -> HookTrace:
    comm = Communicator(
        cast("dist.ProcessGroup", FakeGroup(size)),
        step=bucket.step,
        key=bucket.key,
        seed=getattr(hook, "seed", 0),
    )
    coroutine = hook.reduce(bucket, comm)
    local: list[float] = []
    collectives: list[Collective] = []
    seconds = 0.0
    while True:
        scratch.add_(1)
        start = time.perf_counter()
        try:
            pending = coroutine.send(None)
        except StopIteration:
            if comm.begun:
                raise _has_exchanges(hook) from None
            local.append(seconds + time.perf_counter() - start)
            return HookTrace(tuple(local), tuple(collectives))
        except CommHookError:
            raise
        except Exception as error:
            raise CommHookError(
                f"hook {hook!r} cannot be simulated: among {size} ranks that all hold the same "
                f"gradients it raised {type(error).__name__}: {error}"
            ) from error
        seconds += time.perf_counter() - start
        if isinstance(pending, Exchange):
            raise _has_exchanges(hook)
        members = len(pending.members) or size
        if members == 1:
            continue  # nothing is sent, so the hook's work continues
        local.append(seconds)
        seconds = 0.0
        group = FakeStageGroup(members)
        pending.start(cast("dist.ProcessGroup", group))
        collectives.append(
            Collective(
                pending.operation,
                group.tensor_bytes,
                Members.of(pending.members, size, ranks_per_node),
            )
        )


def _has_exchanges(hook: CommHook) -> CommHookError:
    return CommHookError(
        f"hook {hook!r} cannot be simulated: it has exchanges that take several steps"
    )


def _fastest(traces: Sequence[HookTrace]) -> HookTrace:
    if len({len(trace.collectives) for trace in traces}) > 1:
        return traces[-1]  # what the hook sends depends on its state, which the last run has
    local = zip(*(trace.local_seconds for trace in traces), strict=True)
    return HookTrace(tuple(min(seconds) for seconds in local), traces[-1].collectives)


def _untimed(traces: Sequence[HookTrace]) -> HookTrace:
    return HookTrace(tuple(0.0 for _ in traces[-1].local_seconds), traces[-1].collectives)


@contextmanager
def as_launched(ranks_per_node: int) -> Iterator[None]:
    """Set the environment of rank 0 as a launcher does, for hooks that group ranks by node."""
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
