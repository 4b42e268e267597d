"""A peer that dies raises CommHookPeerError in whatever the others do next. Note [Lost peers]."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dying_ranks import LIMIT_SECONDS, DyingRanks, set_timeout
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks import DistributedDataParallel
from reducer import construction
from reducer.join import StepPlan
from reducer.peers import collective

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
