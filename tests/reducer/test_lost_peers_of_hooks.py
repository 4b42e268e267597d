"""A peer that dies while a hook connects or sends raises CommHookPeerError in the others."""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dying_ranks import LIMIT_SECONDS, DyingRanks
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroupGloo

import commhooks
from commhooks import DistributedDataParallel, GradBucket
from commhooks.comm import stage_groups
from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime import threaded_runner

Die = Callable[[], None]


@pytest.fixture(scope="module")
def ranks() -> Iterator[DyingRanks]:
    with DyingRanks(3) as ranks:
        yield ranks


def wrapped(**options: Any) -> DistributedDataParallel:
    """Return a model whose ranks communicate in backward only."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return DistributedDataParallel(net, broadcast_buffers=False, stable_buckets=True, **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@contextmanager
def connecting_in_a_second(act: Callable[[], None]) -> Iterator[None]:
    """Act after meeting the others in the store, see Note [Meeting before connecting]."""
    make_group = StageGroups._make_group

    def make_group_in_a_second(groups: StageGroups, *args: Any) -> Any:
        act()
        groups._timeout = timedelta(seconds=1)
        return make_group(groups, *args)

    StageGroups._make_group = make_group_in_a_second  # type: ignore[method-assign]
    try:
        yield
    finally:
        StageGroups._make_group = make_group  # type: ignore[method-assign]


@dataclass
class TwoRounds(commhooks.CommHook):
    """Tells of one collective, so the second one connects in backward."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        await comm.all_reduce(torch.ones(1))
        return (await comm.all_reduce(bucket.buffer())).div_(comm.size)


def connect_in_registration(die: Die) -> None:
    model = wrapped()
    with connecting_in_a_second(die):
        commhooks.register(model, "int8")


def connect_in_backward(die: Die) -> None:
    model = wrapped()
    commhooks.register(model, TwoRounds())
    with connecting_in_a_second(die):
        step(model)


@pytest.mark.parametrize(
    ("connect", "stage"), [(connect_in_registration, 0), (connect_in_backward, 1)]
)
def test_a_rank_that_dies_while_a_hook_connects(
    ranks: DyingRanks, connect: Callable[[Die], None], stage: int
) -> None:
    found = ranks.run(connect)
    for raised in found:
        assert raised.kind == "CommHookPeerError", raised
    text = f"the ranks of collective {stage} of a hook cannot meet"
    assert any(text in raised.text for raised in found)


MUCH = 48 << 20


@dataclass
class SendsMuch(commhooks.CommHook):
    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        await send_much(comm)
        return bucket.buffer()


@dataclass
class SendsMuchInBackground(commhooks.CommHook):
    begun = None

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        if self.begun is None:
            self.begun = comm.begin(send_much)
        else:
            await self.begun
        return bucket.buffer()


@dataclass
class SendsMuchBeside(commhooks.CommHook):
    """Sends much for one bucket; a collective of another one fails as soon as a peer dies."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        store = dist.distributed_c10d._get_default_store()
        if bucket.step == 0 or bucket.index() == 0:
            if bucket.step == 1 and comm.rank == 0:
                store.wait([f"rank {other} sends" for other in range(1, comm.size)])
            await comm.all_reduce(torch.ones(1))
            if bucket.step == 1 and comm.rank == comm.size - 1:
                time.sleep(LIMIT_SECONDS)
            await comm.all_reduce(torch.ones(1))
        else:
            store.set(f"rank {comm.rank} sends", "")
            await send_much(comm)
        return bucket.buffer()


@dataclass
class DiesBeforeMeeting(commhooks.CommHook):
    """Has a second collective in the second step, before which the last rank dies."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        await comm.all_reduce(torch.ones(1))
        if bucket.step == 1:
            if comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            await comm.all_reduce(torch.ones(1))
        return bucket.buffer()


async def send_much(comm: commhooks.Communicator) -> Tensor:
    exchange = comm.all_to_all(torch.ones(comm.size, MUCH, dtype=torch.uint8))
    die_halfway(exchange.result)
    return await exchange


def die_halfway(received: Tensor) -> None:
    """Let rank 0 kill the last rank once it has received half a message from it."""
    store, last = dist.distributed_c10d._get_default_store(), dist.get_world_size() - 1
    if dist.get_rank() == last:
        store.set("pid", str(os.getpid()))
    elif dist.get_rank() == 0:
        pid, half = int(store.get("pid")), received[last]
        threading.Thread(target=stop_halfway, args=(half, pid)).start()


def stop_halfway(received: Tensor, pid: int) -> None:
    while not received[0]:
        time.sleep(0)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)  # for what is in the buffers of the socket
    os.kill(pid, signal.SIGKILL)  # rarely all has come, where this thread was late


def die_in_a_hook(_: Die, hook: Any, bucket_cap_mb: float = 25) -> None:
    threaded_runner._EXCHANGE_GRACE_SECONDS = 2.0
    model = wrapped(bucket_cap_mb=bucket_cap_mb)
    commhooks.register(model, hook)
    for _ in range(2):
        step(model)


@pytest.mark.parametrize(
    ("hook", "bucket_cap_mb"),
    [(SendsMuch(), 25), (SendsMuchInBackground(), 25), (SendsMuchBeside(), 5e-5)],
)
def test_a_rank_that_dies_in_the_middle_of_a_message(
    ranks: DyingRanks, hook: Any, bucket_cap_mb: float
) -> None:
    """Gloo does not tell: Note [Messages that never end]."""
    act = functools.partial(die_in_a_hook, hook=hook, bucket_cap_mb=bucket_cap_mb)
    for raised in ranks.run(act):
        assert raised.kind == "CommHookPeerError", raised
        assert raised.seconds < LIMIT_SECONDS / 2


def test_a_rank_that_dies_before_the_others_connect_another_stage(ranks: DyingRanks) -> None:
    """They meet in the store, which does not tell that one of them has gone."""
    for raised in ranks.run(functools.partial(die_in_a_hook, hook=DiesBeforeMeeting())):
        assert raised.kind == "CommHookPeerError", raised
        assert raised.seconds < LIMIT_SECONDS / 2


class NeverConnects:
    """As Gloo does at times if a peer was stopped while it connected, and the others have left."""

    _Options = ProcessGroupGloo._Options  # type: ignore[attr-defined]

    def __init__(self, *_: object) -> None:
        threading.Event().wait()


def connect_without_end(die: Die) -> None:
    model = wrapped()
    stage_groups.ProcessGroupGloo = NeverConnects  # type: ignore[assignment, misc]
    try:
        with connecting_in_a_second(lambda: None):
            commhooks.register(model, "int8")
    finally:
        stage_groups.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def test_a_connection_that_never_comes(ranks: DyingRanks) -> None:
    for raised in ranks.run(connect_without_end):
        assert raised.kind == "CommHookPeerError", raised
        assert "cannot meet: timed out after 1 s" in raised.text
