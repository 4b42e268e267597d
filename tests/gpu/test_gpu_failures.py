"""Failures on NCCL: what one GPU can show, and the loss of a peer on several."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dying_ranks import DyingRanks
from torch import Tensor, nn

import commhooks
from commhooks.comm.stream_groups import StreamGroups
from commhooks.testing import run_ranks

CUDA = torch.device("cuda")
several = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="one GPU: NCCL refuses two ranks on one device"
)


def abort_own_communicators(rank: int, size: int, cycles: int) -> None:
    """A hook's communicators end, with work on them; the model's and new ones work."""
    model_group = dist.group.WORLD
    assert model_group is not None
    groups = StreamGroups(model_group, 1, CUDA)
    numbers = torch.ones(1000, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        groups.open(0).allreduce([numbers]).wait()
        torch.cuda._sleep(cycles)
        groups.open(0).allreduce([numbers]).wait()
    groups.fail(commhooks.CommHookError("broken"))
    with pytest.raises(commhooks.CommHookError, match="broken"):
        groups.open(0)
    torch.cuda.synchronize()
    again = StreamGroups(model_group, 2, CUDA)
    again.open(0).allreduce([numbers]).wait()
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    groups.close()
    again.close()


@pytest.mark.parametrize("cycles", [0, 200_000_000])
def test_aborting_the_communicators_of_a_hook(cycles: int) -> None:
    run_ranks(abort_own_communicators, 1, cycles, backend="nccl", timeout=60)


@dataclass
class Fragile(commhooks.CommHook):
    """Raises on rank 1 between two collectives, if it is told so."""

    breaks: bool = False

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        wire = await comm.all_reduce(bucket.buffer())
        if self.breaks and comm.rank == comm.size - 1:
            raise ValueError("broken between two collectives")
        return (await comm.all_reduce(wire)).div_(comm.size**2)


def fail_and_replace(rank: int, size: int) -> str:
    model = commhooks.DistributedDataParallel(nn.Linear(64, 64).cuda())
    hook = Fragile()
    handle = commhooks.register(model, hook)
    x = torch.ones(2, 64, device="cuda")
    model(x).sum().backward()
    torch.cuda.synchronize()
    hook.breaks = True
    message = ""
    for _ in range(3):  # the others learn of it in the next step
        try:
            model(x).sum().backward()
            torch.cuda.synchronize()  # would wait for the failed rank
        except commhooks.CommHookError as error:
            message = message or str(error)
    handle.replace(Fragile())
    model.zero_grad()
    model(x).sum().backward()
    assert torch.all(model.module.bias.grad == 2.0)
    return message


def test_one_rank_recovers_from_a_failure() -> None:
    (message,) = run_ranks(fail_and_replace, 1, backend="nccl", timeout=60)
    assert "ValueError: broken between two collectives" in message


@several
def test_a_failure_ends_the_hook_on_all_ranks() -> None:
    size = torch.cuda.device_count()
    for message in run_ranks(fail_and_replace, size, backend="nccl", timeout=60):
        assert f"[rank {size - 1}] hook Fragile" in message
        assert "ValueError: broken between two collectives" in message


def lose_a_peer(die: Any, hook: str) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(64, 64).cuda(), stable_buckets=True)
    commhooks.register(model, hook)
    x = torch.ones(2, 64, device="cuda")
    for _ in range(2):
        model(x).sum().backward()
        torch.cuda.synchronize()
        die()


@several
@pytest.mark.parametrize("hook", ["allreduce", "int8"])
def test_a_peer_that_dies(hook: str) -> None:
    with DyingRanks(2) as ranks:
        (raised,) = ranks.run(lose_a_peer, hook, timeout=10.0, backend="nccl")
    assert raised.kind == "CommHookPeerError", raised
    assert "time-out of the process group: 10 s" in raised.text
