"""Runs a hook alone, on real gradients, to see what it awaits and how long it works in between.

The hook is its own model, so that hooks of other packages can be simulated as well, without any
line about them here. It runs in a fake group of any size (fake_group.py). The design note
docs/design/2026-11-21-simulation.md compares this with meta tensors and with a table of costs.
"""

import functools
import gc
import os
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.comm.exchange import Exchange
from commhooks.costs.step_trace import Collective, ExchangeTrace, Members
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, Role
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare
from commhooks.lab.simulation.fake_group import FakeGroup, FakeStageGroup
from commhooks.lab.simulation.typical_steps import sent_bytes, typical_steps, with_arrivals
from commhooks.runtime.execution import new_future
from reducer import GradBucket

__all__ = ["HookTrace", "as_launched", "dry_run"]

_FEWEST, _MOST, _SECONDS = 2, 3, 2.0
"""Timed runs; no more than the fewest after the seconds. Another one warms up before: it allocates
memory and makes the hook's state."""
_LONGEST_EXCHANGE = 1000
"""Steps after which a dry run no longer waits for a hook to take the result of an exchange."""
_EVICTING_ELEMENTS = 1 << 24  # 64 MiB
"""In training, other buckets and backward use the caches before a hook sees its bucket again."""


@dataclass(frozen=True)
class HookTrace:
    """A hook's work on one bucket. Seconds are before, between and after the collectives."""

    local_seconds: tuple[float, ...]
    collectives: tuple[Collective, ...]
    exchanges: tuple[ExchangeTrace, ...] = ()


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
        tracer = _Tracer(hook, size, ranks_per_node, scratch)
        kinds = typical_steps(hook, buckets, size, first_step)
        end = time.monotonic() + _SECONDS
        for step in kinds:
            tracer.step(buckets, step)  # warms up
        delays = {step: tracer.delay(buckets, step) for step in kinds}
        arrivals = {step: step + delay for step, delay in delays.items() if delay}
        sent = functools.partial(sent_bytes, hook, buckets, size)
        shares = with_arrivals(kinds, arrivals, sent)

        runs: list[dict[int, list[HookTrace]]] = []
        fewest, most = (_FEWEST, _MOST) if is_timed else (1, 1)
        while len(runs) < fewest or (len(runs) < most and time.monotonic() < end):
            runs.append({step: tracer.step(buckets, step) for step in sorted(shares)})
    del hook, tracer, sent
    gc.collect()  # its state may be as large as the model, and other sizes follow
    choose = _fastest if is_timed else _untimed
    return [
        (
            share,
            [
                _with_delay(choose(traces), delays.get(step, 0))
                for traces in zip(*(run[step] for run in runs), strict=True)
            ],
        )
        for step, share in shares.items()
    ]


_Part = TypeVar("_Part", HookTrace, ExchangeTrace)


class _Tracer:
    """Runs a hook in a fake group, and its exchanges as soon as it has handed them over."""

    def __init__(self, hook: CommHook, size: int, ranks_per_node: int, scratch: Tensor) -> None:
        self._awaited: set[Exchange] = set()
        self._begun: list[Exchange] = []
        self._hook = hook
        self._size = size
        self._ranks_per_node = ranks_per_node
        self._scratch = scratch

    def step(self, buckets: Sequence[GradBucket], step: int) -> list[HookTrace]:
        """Trace the hook on copies of the buckets."""
        copies = (bucket_with(b, b.buffer().clone(), step=step) for b in buckets)
        return [self._trace(bucket) for bucket in copies]

    def delay(self, buckets: Sequence[GradBucket], step: int) -> int:
        """Return how many steps after ``step`` an exchange that it begins is awaited.

        Runs these steps as well. 0 if the step begins none.
        """
        self._begun.clear()
        self.step(buckets, step)
        begun = set(self._begun)
        if not begun:
            return 0
        self._awaited.clear()
        for later in range(1, _LONGEST_EXCHANGE):
            self.step(buckets, step + later)
            if begun & self._awaited:
                return later
        return _LONGEST_EXCHANGE

    def _trace(self, bucket: GradBucket) -> HookTrace:
        comm = Communicator(
            cast("dist.ProcessGroup", FakeGroup(self._size)),
            step=bucket.step,
            key=bucket.key,
            seed=getattr(self._hook, "seed", 0),
        )
        local, collectives, _ = self._run(self._hook.reduce(bucket, comm))
        exchanges = tuple(self._exchange(exchange) for exchange in comm.begun)
        return HookTrace(local, collectives, exchanges)

    def _exchange(self, exchange: Exchange) -> ExchangeTrace:
        local, collectives, result = self._run(exchange.run())
        exchange.future = new_future(result.device)
        exchange.future.set_result(result)
        self._begun.append(exchange)
        return ExchangeTrace(0, local, collectives)

    def _run(
        self, coroutine: Coroutine[Any, Any, Tensor]
    ) -> tuple[tuple[float, ...], tuple[Collective, ...], Tensor]:
        """Run a coroutine to its end; return its local seconds, collectives and result."""
        local: list[float] = []
        collectives: list[Collective] = []
        seconds = 0.0
        while True:
            self._scratch.add_(1)
            start = time.perf_counter()
            try:
                pending = coroutine.send(None)
            except StopIteration as stop:
                local.append(seconds + time.perf_counter() - start)
                return tuple(local), tuple(collectives), stop.value
            except CommHookError:
                raise
            except Exception as error:
                raise CommHookError(
                    f"hook {self._hook!r} cannot be simulated: among {self._size} ranks that all "
                    f"hold the same gradients it raised {type(error).__name__}: {error}"
                ) from error
            seconds += time.perf_counter() - start
            if isinstance(pending, Exchange):
                self._awaited.add(pending)
                continue
            members = len(pending.members) or self._size
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
                    Members.of(pending.members, self._size, self._ranks_per_node, pending.parallel),
                )
            )


def _with_delay(trace: HookTrace, steps: int) -> HookTrace:
    exchanges = tuple(replace(exchange, steps=steps) for exchange in trace.exchanges)
    return replace(trace, exchanges=exchanges)


def _fastest(traces: Sequence[HookTrace]) -> HookTrace:
    if len({_collectives(trace) for trace in traces}) > 1:
        return traces[-1]  # what the hook sends depends on its state, which the last run has
    exchanges = zip(*(trace.exchanges for trace in traces), strict=True)
    return replace(_fastest_part(traces), exchanges=tuple(map(_fastest_part, exchanges)))


def _collectives(trace: HookTrace) -> tuple[int, ...]:
    return len(trace.collectives), *(len(each.collectives) for each in trace.exchanges)


def _fastest_part(parts: Sequence[_Part]) -> _Part:
    local = zip(*(part.local_seconds for part in parts), strict=True)
    return replace(parts[-1], local_seconds=tuple(map(min, local)))


def _untimed(traces: Sequence[HookTrace]) -> HookTrace:
    exchanges = tuple(_untimed_part(exchange) for exchange in traces[-1].exchanges)
    return replace(_untimed_part(traces[-1]), exchanges=exchanges)


def _untimed_part(part: _Part) -> _Part:
    return replace(part, local_seconds=(0.0,) * len(part.local_seconds))


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
