"""The runner: order of collectives, failures of hooks on some or all ranks, threads that end."""

import gc
import itertools
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.algorithms.lowrank.powersgd import PowerSGD
from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime import scheduler

WRAPPERS = {False: commhooks.DistributedDataParallel, True: TorchDistributedDataParallel}
BUCKETS = 14
STAGES = 3


class Net(nn.Module):
    """The gradient of each parameter is what it is multiplied with."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(24, 24) for _ in range(parameters))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def make_model(torch_ddp: bool, buckets: int = BUCKETS) -> nn.Module:
    """One bucket per parameter."""
    return WRAPPERS[torch_ddp](Net(buckets), bucket_cap_mb=24 * 24 * 4 / 2**20)


def draw_gradients(rank: int, step: int, buckets: int = BUCKETS) -> list[Tensor]:
    """Whole numbers, whose sums are exact in whatever order they are taken."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.randint(-1000, 1000, (24, 24), generator=generator).float() for _ in range(buckets)
    ]


def backward(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    model.zero_grad()
    model(draw_gradients(rank, step, len(model.module.weights))).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def plain_average(size: int, step: int, buckets: int = BUCKETS) -> list[Tensor]:
    of_ranks = [draw_gradients(rank, step, buckets) for rank in range(size)]
    return [torch.stack(tensors).sum(0).div_(size) for tensors in zip(*of_ranks, strict=True)]


# ----------------------------------------------------------------------------------------- order


@dataclass
class Delayed(commhooks.CommHook):
    """The average in three dependent all-reduces, with pauses that differ by rank and stage."""

    milliseconds: float = 3.0
    pauses: random.Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pauses = random.Random(dist.get_rank())

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        # Sizes differ by bucket and by stage, so that no mistake in the order goes unseen.
        marker = torch.full((bucket.index() + 2,), float(bucket.index()))
        for stage in range(STAGES - 1):
            time.sleep(self.pauses.random() * self.milliseconds / 1e3)
            total = await comm.all_reduce(torch.cat([marker, marker.new_full((stage + 1,), 1.0)]))
            assert total[0] == comm.size * bucket.index(), "another bucket's numbers"
            marker = marker + total[-1] - comm.size
        time.sleep(self.pauses.random() * self.milliseconds / 1e3)
        total = await comm.all_reduce(bucket.buffer())
        return total.div_(comm.size)[None]  # any shape will do


def train_delayed(rank: int, size: int, torch_ddp: bool) -> list[bool]:
    model = make_model(torch_ddp)
    commhooks.register(model, Delayed())
    return [
        all(map(torch.equal, backward(model, rank, step), plain_average(size, step)))
        for step in range(3)
    ]


@pytest.mark.parametrize("torch_ddp", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_delayed_ranks_keep_the_order(run_ranks: Any, size: int, torch_ddp: bool) -> None:
    assert run_ranks(train_delayed, size, torch_ddp) == [[True] * 3] * size


def train_without_order(rank: int, size: int) -> bool:
    """Issue each collective as soon as the one before it in the same bucket has completed.

    On one rank, the first bucket comes late: after the second one.
    """

    def open_first(groups: Any, stage: int, ranks: Any) -> Any:
        groups._threads = 2  # as in groups that users make; with one, Gloo keeps order
        return open_group(groups, 0)

    def at_once(unfinished: Any) -> Any:
        is_early = len(unfinished) == 1 and unfinished[0].bucket.index() == 0
        if rank == 1 and is_early:
            return []
        return [each for each in reversed(unfinished) if each.pending is not None]

    open_group = StageGroups.open
    scheduler.in_turn = at_once
    StageGroups.open = open_first
    return all(itertools.chain(*(train_delayed(rank, size, False) for _ in range(5))))


OUT_OF_ORDER = (
    "another bucket's numbers|data size doesn't match|did not finish within|died|[Tt]imed out"
    "|closed by peer"
)


def test_issuing_at_once_fails(run_ranks: Any) -> None:
    """The test before this one can fail: with an abort, a hang or wrong numbers."""
    try:
        results = run_ranks(train_without_order, 2, timeout=10.0)
    except (RuntimeError, TimeoutError) as error:
        if not re.search(OUT_OF_ORDER, str(error)):
            raise
        return
    finally:
        commhooks.testing.close_ranks()  # the workers have a runner that was tampered with
    assert not all(results)


# -------------------------------------------------------------------------------------- failures


@dataclass
class Fragile(commhooks.CommHook):
    """The exact average in three stages, until it is told to break."""

    where: tuple[int, int] | None = field(default=None, init=False, compare=False)
    how: str = field(default="raise", init=False, compare=False)
    recovered: int = field(default=0, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Any:
        for stage in range(STAGES - 1):
            self._break(bucket, stage)
            await comm.all_reduce(torch.ones(100))
        self._break(bucket, STAGES - 1)
        average = (await comm.all_reduce(bucket.buffer())).div_(comm.size)
        self._break(bucket, STAGES)
        if self.where == (bucket.index(), -1):
            return BROKEN_RESULTS[self.how](average)
        return average

    def _break(self, bucket: commhooks.GradBucket, stage: int) -> None:
        if self.where == (bucket.index(), stage):
            raise ValueError(f"broken at stage {stage}")

    def recover(self) -> None:
        self.recovered += 1


BROKEN_RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda average: None,
    "size": lambda average: average[:-1],
    "dtype": lambda average: average.double(),
    "device": lambda average: average.to("meta"),
}


@contextmanager
def expect_error(messages: list[str]) -> Iterator[None]:
    try:
        yield
    except commhooks.CommHookError as error:
        messages.append(f"{type(error).__name__}: {error}")
    else:
        messages.append("no error")


def fail_once(
    rank: int, size: int, torch_ddp: bool, broken: list[int], where: tuple[int, int], how: str
) -> tuple[list[str], list[bool], int]:
    """Trains, breaks the hook on the ranks ``broken`` in the steps 1 and 3, goes on training."""
    model = make_model(torch_ddp, buckets=4)
    hook = Fragile()
    commhooks.register(model, hook)
    messages: list[str] = []
    right = []
    for step in range(6):
        if step in (2, 4):
            hook.where, hook.how = (where, how) if rank in broken else (None, "")
            with expect_error(messages):
                backward(model, rank, step)
            hook.where = None
        else:
            found, expected = backward(model, rank, step), plain_average(size, step, 4)
            right.append(all(map(torch.equal, found, expected)))
    return messages, right, hook.recovered


@pytest.mark.parametrize("torch_ddp", [False, True])
@pytest.mark.parametrize("broken", [[1], [0, 1]])
@pytest.mark.parametrize("where", [(0, 0), (0, STAGES), (3, 0), (3, STAGES)])
def test_a_hook_that_raises(
    run_ranks: Any, torch_ddp: bool, broken: list[int], where: tuple[int, int]
) -> None:
    _check_failures(run_ranks, 2, torch_ddp, broken, where)


@pytest.mark.parametrize("broken", [[0], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("where", [(0, 1), (3, STAGES)])
def test_a_hook_that_raises_on_three_ranks(
    run_ranks: Any, broken: list[int], where: tuple[int, int]
) -> None:
    _check_failures(run_ranks, 3, False, broken, where)


def _check_failures(
    run_ranks: Any, size: int, torch_ddp: bool, broken: list[int], where: tuple[int, int]
) -> None:
    results = run_ranks(fail_once, size, torch_ddp, broken, where, "raise")
    for rank, (messages, right, recovered) in enumerate(results):
        assert right == [True] * 4
        assert recovered == 2
        for message in messages:
            assert f"ValueError: broken at stage {where[1]}" in message
            assert f"bucket {where[0]} (parameters" in message
            if rank not in broken:
                assert message.startswith("CommHookPeerError: ")
                assert any(f"[rank {culprit}] hook Fragile" in message for culprit in broken)


@pytest.mark.parametrize("torch_ddp", [False, True])
@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("nothing", "returned NoneType"),
        ("size", "returned 575 elements"),
        ("dtype", "torch.float64"),
        ("device", "on meta"),
    ],
)
def test_a_result_that_does_not_fit(run_ranks: Any, how: str, found: str, torch_ddp: bool) -> None:
    results = run_ranks(fail_once, 2, torch_ddp, [1], (1, -1), how)
    for rank, (messages, right, _) in enumerate(results):
        assert right == [True] * 4
        for message in messages:
            assert message.startswith("CommHookResultError" if rank == 1 else "CommHookPeerError")
            assert found in message
            assert "expected the average, 576 elements of torch.float32 on cpu" in message


@dataclass
class Odd(commhooks.CommHook):
    """Awaits in ways that cannot work."""

    how: str = ""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        if self.how == "foreign":
            await Foreign()
        elif self.how == "strided":
            await comm.all_reduce(torch.ones(4, 4).T[1:3])
        elif self.how == "parts":
            await comm.all_to_all(torch.ones(2 * comm.size + 1))
        elif self.how == "never":
            pass
        return bucket.buffer()


class Foreign:
    def __await__(self) -> Iterator[str]:
        yield "something else"


def backward_oddly(rank: int, size: int, how: str) -> str:
    model = make_model(False, buckets=2)
    commhooks.register(model, Odd(how))
    messages: list[str] = []
    with expect_error(messages):
        backward(model, rank, 0)
    return messages[0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("foreign", "it awaits 'something else'"),
        ("strided", "contiguous"),
        ("parts", "multiple of the 2 ranks"),
        ("never", "no error"),
    ],
)
def test_odd_awaits(run_ranks: Any, how: str, expected: str) -> None:
    for message in run_ranks(backward_oddly, 2, how):
        assert expected in message


@dataclass
class FragilePowerSGD(PowerSGD):
    """Fails on rank 1 in one step, after rank 1 has issued its part of the first bucket."""

    broken: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        store = dist.distributed_c10d._get_default_store()
        if self.broken and comm.rank == 0:
            store.wait(["rank 1 fails"])  # by the time that the first bucket is done
        if self.broken and comm.rank == 1 and bucket.index() == 1:
            store.set("rank 1 fails", "")
            raise ValueError("broken")
        return await super().reduce(bucket, comm)


def train_one_sided(rank: int, size: int) -> tuple[list[Tensor], bool]:
    model = make_model(False, buckets=2)
    hook = FragilePowerSGD(2, min_compression_rate=1.0, start_step=0, two_sided=False)
    commhooks.register(model, hook)
    for step in range(3):
        backward(model, rank, step)
    before = hook.state_dict()
    hook.broken = True
    with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
        backward(model, rank, 3)
    hook.broken = False
    after = hook.state_dict()
    has_committed = not all(
        torch.equal(before[name][key], after[name][key]) for name in before for key in before[name]
    )
    return backward(model, rank, 3), has_committed


def test_state_that_only_some_ranks_have_changed(run_ranks: Any) -> None:
    """PowerSGD need not recover: a step that is repeated starts from the same factors."""
    (first, first_committed), (second, second_committed) = run_ranks(train_one_sided)
    assert (first_committed, second_committed) == (True, False)
    assert all(map(torch.equal, first, second))


class BreaksBackward(torch.autograd.Function):
    """Raises in backward, on ranks that are told to, after some buckets have been launched."""

    broken = False

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if BreaksBackward.broken:
            raise ValueError("out of luck")
        return gradient


class BreakingNet(Net):
    """Breaks between the second bucket and the first."""

    def forward(self, gradients: list[Tensor]) -> Tensor:
        first = BreaksBackward.apply((self.weights[0] * gradients[0]).sum())
        return first + (self.weights[1] * gradients[1]).sum()


def break_backward(rank: int, size: int, **options: Any) -> str:
    model = commhooks.DistributedDataParallel(BreakingNet(2), **options)
    commhooks.register(model, Fragile())
    message = "no error"
    for step in range(8):
        BreaksBackward.broken = rank == 1 and step in (3, 4)
        try:
            averages = backward(model, rank, step)
        except (commhooks.CommHookError, ValueError) as error:
            assert step in (3, 4)
            message = str(error)
        else:
            assert step not in (3, 4)
            assert all(map(torch.equal, averages, plain_average(size, step, 2)))
    return message


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("megabytes", [0.001, 1])
def test_a_backward_that_raises(
    run_ranks: Any, megabytes: float, unused: bool, stable: bool
) -> None:
    """Also before its first bucket, and though ranks share which parameters they used."""
    peers, own = run_ranks(
        break_backward,
        2,
        bucket_cap_mb=megabytes,
        find_unused_parameters=unused,
        stable_buckets=stable,
    )
    assert "[rank 1] the backward pass ended before its last bucket" in peers
    assert "out of luck" in own


def abort_before_any_gradient(rank: int, size: int) -> None:
    model = make_model(False, buckets=2)
    commhooks.register(model, Fragile())
    for step in range(4):
        if rank == 1 and step == 2:
            model(draw_gradients(rank, step, 2))
            model.reducer.abort()
        assert all(map(torch.equal, backward(model, rank, step), plain_average(size, step, 2)))


def test_a_forward_without_a_backward_fails_no_step(run_ranks: Any) -> None:
    run_ranks(abort_before_any_gradient, 2)


# --------------------------------------------------------------------------------- life and death


def count_threads() -> int:
    return sum(thread.name == "commhooks" for thread in threading.enumerate())


def drop_model(rank: int, size: int) -> tuple[bool, int]:
    model = make_model(False, buckets=2)
    commhooks.register(model, Fragile())
    backward(model, rank, 0)
    during = count_threads()
    del model
    gc.collect()
    deadline = time.monotonic() + 10
    while count_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return during > 0, count_threads()


def test_the_thread_ends_with_the_model(run_ranks: Any) -> None:
    assert run_ranks(drop_model, 2) == [(True, 0)] * 2


def drop_model_without_collection(rank: int, size: int, torch_ddp: bool) -> tuple[int, int]:
    model = make_model(torch_ddp, buckets=2)
    gc.collect()  # what earlier tests left
    gc.disable()
    commhooks.register(model, Fragile())
    backward(model, rank, 0)
    kept = [weakref.ref(each) for each in gc.get_objects() if type(each) is StageGroups]
    del model
    deadline = time.monotonic() + 10
    while any(each() is not None for each in kept) and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.enable()
    return len(kept), sum(each() is not None for each in kept)


@pytest.mark.parametrize("torch_ddp", [False, True])
def test_a_dropped_model_leaves_nothing_to_the_garbage_collector(
    run_ranks: Any, torch_ddp: bool
) -> None:
    """A next process group on the same port would use the store of this one, and hang."""
    assert run_ranks(drop_model_without_collection, 2, torch_ddp) == [(2, 0)] * 2


@pytest.mark.parametrize("torch_ddp", [False, True])
def test_errors_do_not_keep_the_model_alive(run_ranks: Any, torch_ddp: bool) -> None:
    run_ranks(fail_once, 2, torch_ddp, [1], (3, STAGES), "raise")
    assert run_ranks(drop_model, 2) == [(True, 0)] * 2
