"""Measures how fast Gloo is on this machine, with two ranks that send to each other."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.adapters.handle import register
from commhooks.adapters.wrapper import wrap
from commhooks.cluster import Ranks
from commhooks.comm.communicator import Communicator
from commhooks.costs.gloo import Gloo
from commhooks.hook.base import CommHook
from reducer import GradBucket

__all__ = ["measure_gloo"]

_STAGES = 100
_ROUNDS = 2 * _STAGES  # of messages: an all-reduce of two ranks is a ring of two rounds
_LARGE_BYTES = 32 << 20
_REPEATS = 7

_Times = tuple[float, float]


def measure_gloo(ranks: Ranks) -> Gloo:
    """Measure with the first two of ``ranks``, while the others are idle."""
    rates: Gloo = ranks(_measure)[0]
    return rates


@dataclass
class _Chain(CommHook):
    """Awaits small all-reduces one after the other, as a hook with many stages does."""

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        small = torch.zeros(16)
        for _ in range(_STAGES):
            await comm.all_reduce(small)
        return bucket.buffer()


def _measure(rank: int) -> Gloo | None:
    pair = dist.new_group([0, 1])
    if rank > 1:
        return None
    model = wrap(nn.Linear(4, 1, bias=False), process_group=pair)
    register(model, _Chain())
    large = torch.zeros(_LARGE_BYTES // 4)

    def time_all(work: Callable[[], object]) -> list[_Times]:
        return [_time(work, pair) for _ in range(_REPEATS)]

    chains = time_all(lambda: model(torch.ones(1, 4)).sum().backward())
    transfers = time_all(lambda: dist.all_reduce(large, group=pair))
    return Gloo(
        round_seconds=_least(chains, 0) / _ROUNDS,
        message_cpu_seconds=_least(chains, 1) / _ROUNDS,
        byte_cpu_seconds=_least(transfers, 1) / _LARGE_BYTES,
    )


def _time(work: Callable[[], object], pair: dist.ProcessGroup) -> _Times:
    """Return seconds of the clock, and seconds of all threads on cores."""
    dist.barrier(pair)
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def _least(times: list[_Times], which: int) -> float:
    """Return the time with the least other work; the first run also opens the connections."""
    return min(pair[which] for pair in times[1:])
