"""What awaiting a collective costs: the functions that rank processes run."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.comm.stage_groups import StageGroups
from reducer import DistributedDataParallel, GradBucket

STAGES = 50
_small = torch.zeros(16)
_models: list[nn.Module] = []
_groups: list[dist.ProcessGroup] = []


@dataclass
class ManyStages(commhooks.CommHook):
    """A hook with dependent collectives of 64 bytes."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> torch.Tensor:
        """Await STAGES collectives."""
        for _ in range(STAGES):
            await comm.all_reduce(_small)
        return bucket.buffer()


def prepare(rank: int) -> None:
    """Wrap a model with one bucket of one parameter."""
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    commhooks.register(model, ManyStages())
    _models[:] = [model]
    awaited(rank)  # connects the stage groups


def awaited(rank: int) -> float:
    """Time a backward whose only bucket awaits all stages."""
    loss = _models[0](torch.ones(1, 4)).sum()
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def bare(rank: int, groups: int) -> float:
    """Time the same collectives one after the other, in turn on ``groups`` stage groups.

    Each stage of a hook has its own group, and a group that was idle answers later than one that
    was just used.
    """
    while len(_groups) < groups:
        _groups.append(_maker().open(len(_groups)))
    dist.barrier()
    start = time.perf_counter()
    for stage in range(STAGES):
        _groups[stage % groups].allreduce([_small]).wait()
    return time.perf_counter() - start


@functools.cache
def _maker() -> StageGroups:
    assert dist.group.WORLD is not None
    return StageGroups(dist.group.WORLD, token=0)
