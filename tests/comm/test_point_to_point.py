"""Collectives made of messages between two ranks: many at once, on ranks of different speed."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.comm import point_to_point
from commhooks.comm.stage_groups import StageGroups

BUCKETS = 5
WIDTH = 300_000  # more than what sockets take in at once


@dataclass
class Exchanging(commhooks.CommHook):
    """Keeps what an all-to-all and an all-gather after it have brought."""

    results: dict[int, list[Tensor]] = field(default_factory=dict, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        time.sleep(0.01 * ((comm.rank + bucket.index()) % comm.size))
        parts = numbers(comm.rank, bucket.index(), comm.size).view(comm.size, -1)
        exchanged = await comm.all_to_all(parts)
        time.sleep(0.01 * ((2 * comm.rank + bucket.index()) % comm.size))
        gathered = await comm.all_gather(parts[0])
        self.results[bucket.index()] = [exchanged, gathered]
        return bucket.buffer()


def numbers(rank: int, bucket: int, size: int) -> Tensor:
    return torch.arange(size * WIDTH) + 1_000_000_000 * (10 * rank + bucket)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(WIDTH) for _ in range(BUCKETS))

    def forward(self) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum()


def exchange(rank: int, size: int) -> list[bool]:
    hook = Exchanging()
    model = commhooks.DistributedDataParallel(Layers(), bucket_cap_mb=1)
    commhooks.register(model, hook)
    matches = []
    for _ in range(2):
        model().backward()
        assert len(hook.results) == BUCKETS
        for bucket, (exchanged, gathered) in hook.results.items():
            of_ranks = [numbers(peer, bucket, size).view(size, -1) for peer in range(size)]
            matches.append(torch.equal(exchanged, torch.stack([parts[rank] for parts in of_ranks])))
            matches.append(torch.equal(gathered, torch.stack([parts[0] for parts in of_ranks])))
        hook.results.clear()
    return matches


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.exhaustive),
        3,
        pytest.param(4, marks=pytest.mark.exhaustive),
    ],
)
def test_many_at_once(run_ranks: Any, size: int) -> None:
    for matches in run_ranks(exchange, size):
        assert len(matches) == 2 * 2 * BUCKETS
        assert all(matches)


@dataclass
class Breaking(commhooks.CommHook):
    """Fails on the last rank, while others wait for what it would pass on."""

    operation: str = "all_gather"
    broken: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        if self.broken and comm.rank == comm.size - 1 and bucket.index() == 1:
            raise ValueError("broken")
        await getattr(comm, self.operation)(torch.ones(comm.size, WIDTH))
        return bucket.buffer()


def break_and_go_on(rank: int, size: int, operation: str) -> str:
    hook = Breaking(operation)
    model = commhooks.DistributedDataParallel(Layers(), bucket_cap_mb=1)
    commhooks.register(model, hook)
    model().backward()
    hook.broken = True
    with pytest.raises(commhooks.CommHookError) as caught:
        model().backward()
    hook.broken = False
    model().backward()
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("operation", ["all_gather", "all_to_all"])
def test_a_rank_that_fails(run_ranks: Any, size: int, operation: str) -> None:
    for message in run_ranks(break_and_go_on, size, operation):
        assert "ValueError: broken" in message


def post_in_part(rank: int, size: int) -> str:
    """Rank 2 has gone when rank 0 issues all-to-alls; it and rank 1 have something else pending."""
    groups = StageGroups(dist.group.WORLD, token=1)
    group = groups.open(0)
    dist.barrier()
    if rank == 2:
        del group
        groups.abort()
        return "gone"
    pending = group.recv([torch.empty(1)], 1 - rank, 7)
    if rank == 0:
        with pytest.raises(point_to_point.BrokenConnectionError):
            issue_for_ever(group, size)
    try:
        pending.wait()
    except RuntimeError:
        return "failed"
    return "completed"


def issue_for_ever(group: Any, size: int) -> None:
    """Raises once the end of a connection has been seen."""
    parts = torch.ones(size, 4)
    works = []
    while True:
        works.append(point_to_point.all_to_all(group, parts, torch.empty_like(parts)))
        time.sleep(0.01)


def test_a_partly_posted_collective_does_not_block_others(run_ranks: Any) -> None:
    """See Note [Nothing posted is dropped]."""
    assert run_ranks(post_in_part, 3) == ["failed", "failed", "gone"]


class Refusing:
    """A group whose sends raise, as for an invalid argument."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, *_: Any) -> None:
        dist.barrier()  # what is raised closes connections, which the peer may still open
        raise TypeError("refused")


def post_receives_only(rank: int, size: int) -> str:
    groups = StageGroups(dist.group.WORLD, token=2)
    received = torch.zeros(1)
    messages = ([(1 - rank, torch.ones(1))], [(1 - rank, received)])
    with pytest.raises(TypeError, match="refused"):
        point_to_point.send_and_receive(Refusing(groups.open(0)), *messages)
    try:
        point_to_point.send_and_receive(groups.open(0), *messages).wait()
    except (RuntimeError, commhooks.CommHookPeerError):
        return "closed"
    return "used by a later collective"


def test_a_receive_is_not_left_behind(run_ranks: Any) -> None:
    """Whatever is raised: a later message would arrive in memory that nobody reads."""
    assert run_ranks(post_receives_only, 2) == ["closed"] * 2
