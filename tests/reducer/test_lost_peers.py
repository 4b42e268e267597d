"""A peer that dies raises CommHookPeerError in whatever the others do next. Note [Lost peers]."""

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
from support.dying_ranks import LIMIT_SECONDS, DyingRanks, set_timeout
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks import DistributedDataParallel, GradBucket
from commhooks.comm import stage_groups
from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime import threaded_runner
from commhooks.testing import run_ranks
from reducer import construction, peers
from reducer.join import StepPlan
from reducer.peers import collective, is_peer_loss

Die = Callable[[], None]


@pytest.fixture(scope="module")
def ranks() -> Iterator[DyingRanks]:
    with DyingRanks(3) as ranks:
        yield ranks


class Net(nn.Module):
    """Two layers, the second one not always in use, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def quiet(**options: Any) -> DistributedDataParallel:
    """Return a model whose ranks communicate in backward only, over Gloo unless asked otherwise."""
    options = {"broadcast_buffers": False, "stable_buckets": True, "host_memory": False} | options
    return DistributedDataParallel(Net(), **options)


# ------------------------------------------------------------- what the other ranks are doing
# `die()` ends the last rank. What the others do next raises.


def average(die: Die, hook: str = "", **options: Any) -> None:
    model = quiet(bucket_cap_mb=0.00005, **options)
    if hook:
        commhooks.register(model, hook)
    step(model)
    die()
    step(model)


def average_on_host(die: Die) -> None:
    average(die, host_memory=True)


def average_in_half(die: Die) -> None:
    average(die, "fp16")


def average_in_bfloat16(die: Die) -> None:
    average(die, "bf16")


def hook_in_python(die: Die) -> None:
    average(die, "int8")


def sparse_average(die: Die) -> None:
    model = DistributedDataParallel(nn.Embedding(4, 4, sparse=True), stable_buckets=True)
    model(torch.ones(2, dtype=torch.long)).sum().backward()
    die()
    model(torch.ones(2, dtype=torch.long)).sum().backward()


def manual_finalization(die: Die, **options: Any) -> None:
    model = quiet(**options)
    model.require_manual_backward_finalization = True
    step(model)
    die()
    model.finalize_backward()
    step(model)
    model.finalize_backward()


def manual_finalization_on_host(die: Die) -> None:
    manual_finalization(die, host_memory=True)


def rebuild(die: Die) -> None:
    model = DistributedDataParallel(Net(), broadcast_buffers=False)
    step(model)
    die()
    model(torch.ones(2, 4))


def rebuild_with_noop(die: Die) -> None:
    model = DistributedDataParallel(Net(), broadcast_buffers=False)
    commhooks.register(model, "noop")
    step(model)
    die()
    model(torch.ones(2, 4))


def buffers(die: Die) -> None:
    model = DistributedDataParallel(Net(), stable_buckets=True)
    die()
    model(torch.ones(2, 4))


def buffer_hook(die: Die) -> None:
    def reduce(_: object, buffers: dict[str, Tensor]) -> list[Any]:
        return [dist.all_reduce(b, async_op=True).get_future() for b in buffers.values()]

    model = DistributedDataParallel(Net(), stable_buckets=True)
    commhooks.register(model, "noop")
    model._register_buffer_comm_hook(None, reduce)
    die()
    step(model)


def verification(die: Die) -> None:
    die()
    DistributedDataParallel(Net())


def initial_broadcast(die: Die) -> None:
    broadcast = construction.broadcast
    construction.broadcast = lambda *args: (die(), broadcast(*args))  # type: ignore[assignment]
    try:
        DistributedDataParallel(Net())
    finally:
        construction.broadcast = broadcast


def use_of_parameters(die: Die) -> None:
    model = quiet(find_unused_parameters=True)

    def reduce(_: object, bucket: commhooks.GradBucket) -> torch.futures.Future[Tensor]:
        dist.all_reduce(bucket.buffer())
        die()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    commhooks.register(model, reduce)
    model.module.forward = model.module.first.forward  # type: ignore[method-assign]
    step(model)


def use_of_parameters_by_one_that_uses_all(die: Die) -> None:
    model = quiet(find_unused_parameters=True)

    def reduce(_: object, bucket: commhooks.GradBucket) -> torch.futures.Future[Tensor]:
        die()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    commhooks.register(model, reduce)
    step(model)


def function_that_communicates(die: Die) -> None:
    model = quiet()

    def reduce(_: object, bucket: commhooks.GradBucket) -> torch.futures.Future[Any]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    commhooks.register(model, reduce)
    step(model)
    die()
    step(model)


def forward_in_join(die: Die) -> None:
    model = quiet()
    with model.join():
        step(model)
        die()
        model(torch.ones(2, 4))


def plans_in_join(die: Die) -> None:
    model = quiet()
    with model.join():
        model._join_config = model._join_config._replace(is_first_joinable=False)
        die()
        model(torch.ones(2, 4))


def early_end_in_join(die: Die) -> None:
    model = quiet()
    with model.join():
        die()


def shadow_of_join(die: Die) -> None:
    model = quiet()
    hook = model.join_hook()
    die()
    hook.main_hook()


def skipped_buckets_in_join(die: Die) -> None:
    model = quiet(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    plan = StepPlan([0], synchronizes=True, syncs_buffers=False)
    die()
    plan.share_skipped(model)


def last_of_join(die: Die) -> None:
    hook = quiet().join_hook()
    die()
    hook.post_hook(is_last_joiner=True)


def register(die: Die) -> None:
    model = quiet()
    die()
    commhooks.register(model, "int8")


def replace(die: Die) -> None:
    handle = commhooks.register(quiet(), "int8")
    die()
    handle.replace("allreduce")


def remove(die: Die) -> None:
    handle = commhooks.register(quiet(), "gossip")
    die()
    handle.remove()


def torch_ddp(die: Die) -> None:
    model = TorchDDP(nn.Linear(4, 4))
    commhooks.register(model, "int8").remove()
    for _ in range(2):  # torch rebuilds its buckets
        step(model)
    die()
    step(model)


UNDER_WAY: dict[Callable[[Die], None], str | tuple[str, ...]] = {
    average: "the average of bucket 0 (parameters second.bias ... second.weight) at step 1",
    average_on_host: "the average of bucket 0 (parameters second.bias ... second.weight) at step 1",
    average_in_half: "the average of bucket 0",
    average_in_bfloat16: "the average of bucket 0",
    hook_in_python: "hook Int8",
    sparse_average: "the average of bucket 0 (parameters weight) at step 1",
    manual_finalization: "the average of bucket 0",
    manual_finalization_on_host: ("the average of bucket 0", "the end of a step"),
    rebuild: "the agreement on the order of gradients",
    rebuild_with_noop: "the agreement on the order of gradients",
    buffers: "the broadcast of 1 tensors of rank 0",
    buffer_hook: "what the end of backward was to wait for",
    verification: "the comparison of the ranks' parameters",
    initial_broadcast: "the broadcast of 5 tensors of rank 0",
    use_of_parameters: "the exchange of which parameters each rank used",
    use_of_parameters_by_one_that_uses_all: "the exchange of which parameters each rank used",
    function_that_communicates: "the average of bucket 0",
    forward_in_join: "the report of a rank that has inputs to join()",
    plans_in_join: "the exchange of what each rank is about to do, inside join(),",
    early_end_in_join: "the exchange of what each rank is about to do, inside join(),",
    shadow_of_join: "the exchange of what each rank is about to do, inside join(),",
    skipped_buckets_in_join: "the broadcast of which buckets a step skips",
    last_of_join: "the search for the rank that finished last",
    register: "the comparison of the ranks' hook and options",
    replace: "the comparison of the ranks' hook and options",
    remove: "the average of the parameters",
    torch_ddp: "the average at step 2",
}
# The sender of a broadcast notices. The other one has what it needs, and goes on.
NOTICED_BY_SENDER = {
    rebuild,
    rebuild_with_noop,
    buffers,
    initial_broadcast,
    skipped_buckets_in_join,
}
HOW = ["killed", "exits", "raises"]
CASES = [
    pytest.param(
        act, how, id=f"{act.__name__}-{how}",
        marks=[] if number % len(HOW) == HOW.index(how) else [pytest.mark.exhaustive],
    )
    for number, act in enumerate(UNDER_WAY)
    for how in HOW
]  # fmt: skip


@pytest.mark.parametrize(("act", "how"), CASES)
def test_the_others_raise_the_same_error(
    ranks: DyingRanks, act: Callable[[Die], None], how: str
) -> None:
    found = ranks.run(act, how=how)
    for rank, raised in enumerate(found[:1] if act in NOTICED_BY_SENDER else found):
        assert raised.kind == "CommHookPeerError", raised
        if "cannot meet" in raised.text:  # this rank was still connecting its hook
            assert "A rank has ended" in raised.text
            continue
        # A hook's peers quote the rank that published the loss first.
        where = "another rank failed: [rank " if "another rank" in raised.text else UNDER_WAY[act]
        assert raised.text.removeprefix(f"[rank {rank}] ").startswith(where)
        who = "a peer" if act is hook_in_python else "rank 2"
        assert f"{who} failed, left or did not answer" in raised.text
        assert "time-out of the process group: 60 s" in raised.text
        assert "Restart all ranks from a checkpoint" in raised.text
        assert raised.seconds < LIMIT_SECONDS / 2


@pytest.mark.parametrize("act", [average, average_on_host])
def test_a_rank_that_stops(ranks: DyingRanks, act: Callable[[Die], None]) -> None:
    """A rank that waits for the whole time-out ends the wait of the others."""
    found = ranks.run(act, how="stopped", timeout=1.0)
    for raised in found:
        assert raised.kind == "CommHookPeerError", raised
        assert "rank 2 failed, left or did not answer" in raised.text
        assert "time-out of the process group: 1 s" in raised.text
    assert any("Timed out waiting" in raised.text for raised in found)


def average_with_patience(die: Die, host_memory: bool) -> None:
    """Let rank 1 wait for the others longer than they wait for the last rank."""

    def die_and_wait() -> None:
        die()
        if dist.get_rank() == 1:
            set_timeout(LIMIT_SECONDS)

    average(die_and_wait, host_memory=host_memory)


@pytest.mark.parametrize("host_memory", [False, True])
def test_a_rank_that_only_the_peers_lost(host_memory: bool) -> None:
    """Both neighbours of rank 1 in the ring lose rank 3, and tell in their notes."""
    with DyingRanks(4) as ranks:
        late, closed, later = ranks.run(
            average_with_patience, host_memory, how="stopped", timeout=1.0
        )
    assert "Connection closed by peer" in closed.text
    for raised in (late, closed, later):
        assert "rank 3 failed, left or did not answer" in raised.text


def receive_twice(die: Die) -> None:
    die()
    if dist.get_rank() == 0:
        for attempt in ("first", "second"):
            with pytest.raises(commhooks.CommHookPeerError, match="rank 2 failed"):
                receive_from_the_last(attempt)


def receive_from_the_last(attempt: str) -> None:
    with collective(dist.group.WORLD, f"the {attempt} message"):  # type: ignore[arg-type]
        dist.recv(torch.empty(1), src=dist.get_world_size() - 1)


def test_a_rank_that_loses_a_peer_twice(ranks: DyingRanks) -> None:
    """It closed the connections itself, and does not suspect a rank that does other work."""
    for raised in ranks.run(receive_twice):
        assert not raised.text


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
    model = quiet()
    with connecting_in_a_second(die):
        commhooks.register(model, "int8")


def connect_in_backward(die: Die) -> None:
    model = quiet()
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
    model = quiet(bucket_cap_mb=bucket_cap_mb)
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
    model = quiet()
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


SIGNS = [
    "Application timeout caused pair closure",
    "Wait timeout",
    "wait timeout after 10000ms, keys: /default_pg/0//0/1/0",
    "Timed out waiting 10000ms for recv operation to complete",
    "Socket Timeout",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41",
    "Connect timeout [127.0.0.1]:29500",
    "Connection reset by peer",
    "Remote peer closed the connection.",
    "NCCL operation timed out",
    "NCCL Async Error: remote process exited or there was a network error",
    "NCCL communicator was aborted after a previous error",
]


@pytest.mark.parametrize("text", SIGNS)
def test_texts_of_backends_and_stores(text: str) -> None:
    assert is_peer_loss(RuntimeError(text))
    assert not is_peer_loss(ValueError(text))


@pytest.mark.parametrize(
    "text",
    [
        "NCCL Async Error: invalid usage",
        "Invalid timeout",
        "timeout must be positive",
        "a peer review",
    ],
)
def test_texts_of_other_errors(text: str) -> None:
    assert not is_peer_loss(RuntimeError(text))


@pytest.mark.parametrize(
    ("text", "is_loss"),
    [
        ("NCCL error: remote process exited or there was a network error", True),
        ("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", False),
        ("NCCL error: Cuda failure 2 'out of memory'", False),
        ("NCCL error: invalid usage", False),
    ],
)
def test_failures_of_the_own_device_are_no_lost_peers(text: str, is_loss: bool) -> None:
    assert is_peer_loss(dist.DistBackendError(text)) == is_loss


def open_connections(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    torch.set_default_device("mps")  # which is not there
    try:
        receives = peers._receives(peers.gloo_of(group))
    finally:
        torch.set_default_device(None)
    dist.barrier()
    peers.abort_works(receives.values())
    assert set(receives) == {1 - rank}


def test_lost_peers_are_found_under_a_default_device() -> None:
    run_ranks(open_connections, 2)
