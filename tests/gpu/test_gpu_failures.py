"""Failures on NCCL, and the communicators of a hook's own; bench/gpu/deaths.py has deaths."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support.several_ranks import PATIENCE
from torch import Tensor, nn

import commhooks
from commhooks.comm.private_groups import PrivateGroups
from commhooks.testing import run_ranks

CUDA = torch.device("cuda", 0)


def use_a_private_communicator(rank: int, size: int, cycles: int) -> None:
    """Closing waits for what is under way; the model's communicator and new ones work."""
    model_group = dist.group.WORLD
    assert model_group is not None
    numbers = torch.ones(1000, device="cuda")
    for token in range(2):
        groups = PrivateGroups(model_group, token, CUDA)
        groups.connect({(): 1})
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(cycles)
            groups.open(0).allreduce([numbers]).wait()
        groups.close()
        dist.all_reduce(numbers)
    torch.cuda.synchronize()
    assert torch.all(numbers == 1.0)


@pytest.mark.parametrize("cycles", [0, 200_000_000])
def test_a_private_communicator(cycles: int) -> None:
    run_ranks(use_a_private_communicator, 1, cycles, backend="nccl", timeout=PATIENCE)


@dataclass
class Fragile(commhooks.CommHook):
    """Raises on the last rank between two collectives, if it is told so."""

    breaks: bool = False

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        wire = await comm.all_reduce(bucket.buffer())
        if self.breaks and comm.rank == comm.size - 1:
            raise ValueError("broken between two collectives")
        return (await comm.all_reduce(wire)).div_(comm.size**2)


def fail_and_go_on(rank: int, size: int) -> str:
    model = commhooks.DistributedDataParallel(nn.Linear(64, 64).cuda())
    hook = Fragile()
    handle = commhooks.register(model, hook)
    x = torch.ones(2, 64, device="cuda")
    model(x).sum().backward()
    hook.breaks = True
    with pytest.raises(commhooks.CommHookError) as caught:
        model(x).sum().backward()
    hook.breaks = False
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        assert torch.all(model.module.bias.grad == 2.0)
        handle.replace(Fragile())
    return str(caught.value)


def test_one_rank_recovers_from_a_failure() -> None:
    (message,) = run_ranks(fail_and_go_on, 1, backend="nccl", timeout=PATIENCE)
    assert "ValueError: broken between two collectives" in message
