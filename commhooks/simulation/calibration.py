"""How fast Gloo is on this machine: two ranks send to each other over loopback."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.communicator import Communicator
from commhooks.handle import register
from commhooks.hook import CommHook
from commhooks.ranks import Ranks
from commhooks.simulation.gloo import Gloo
from reducer import DistributedDataParallel, GradBucket

__all__ = ["measure_gloo"]

_STAGES = 100
_ROUNDS = 2 * _STAGES  # of messages: an all-reduce of two ranks is a ring of two rounds
_LARGE_BYTES = 32 << 20
_REPEATS = 7


def measure_gloo() -> Gloo:
    """Takes seconds, most of them to start two processes."""
    with Ranks(2) as ranks:
        rates: Gloo = ranks(_measure)[0]
    return rates


@dataclass
class _Chain(CommHook):
    """Awaits small all-reduces, each after the other, as a hook of many stages does."""

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        small = torch.zeros(16)
        for _ in range(_STAGES):
            await comm.all_reduce(small)
        return bucket.buffer()


def _measure(rank: int) -> Gloo:  # noqa: ARG001
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    register(model, _Chain())
    chains = [_time(lambda: model(torch.ones(1, 4)).sum().backward()) for _ in range(_REPEATS)]
    large = torch.zeros(_LARGE_BYTES // 4)
    transfers = [_time(lambda: dist.all_reduce(large)) for _ in range(_REPEATS)]
    return Gloo(
        round_seconds=_least(chains, 0) / _ROUNDS,
        message_cpu_seconds=_least(chains, 1) / _ROUNDS,
        byte_cpu_seconds=_least(transfers, 1) / _LARGE_BYTES,
    )


def _time(work: object) -> tuple[float, float]:
    """Seconds on the clock, and of all threads on cores."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    work()  # type: ignore[operator]
    return time.perf_counter() - wall, time.process_time() - cpu


def _least(times: list[tuple[float, float]], which: int) -> float:
    """Without what else the machine did; the first one has made the connections."""
    return min(pair[which] for pair in times[1:])
