"""Hooks on torch's own wrapper, with its special modes."""

import copy
import gc
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.adapters.torch_ddp import TorchDDPAdapter
from commhooks.testing.probe import Trainer
from reducer.extension import ENGINE


@dataclass
class Recording(commhooks.CommHook):
    """The average; keeps what it was told of each bucket."""

    seen: list[tuple[int, int, bool, tuple[str, ...]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    broken: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        if self.broken:
            raise ValueError("broken")
        self.seen.append((comm.step, bucket.index(), bucket.is_last(), tuple(bucket.names)))
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


class Net(nn.Module):
    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.twice = twice

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        if self.twice:
            hidden = checkpoint(self.second, hidden, use_reentrant=False)
        return self.second(hidden)


def train(rank: int, size: int, mode: dict[str, bool]) -> list[Any]:
    torch.manual_seed(0)
    net = Net(twice=mode.get("static_graph", False))
    reference = copy.deepcopy(net)
    model = TorchDistributedDataParallel(net, bucket_cap_mb=0.0001, **mode)
    hook = Recording()
    commhooks.register(model, hook)
    for step in range(4):
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        if step == 2:
            hook.broken = rank == 0
            with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
                model(inputs).square().sum().backward()
            hook.broken = False
            continue
        model(inputs).square().sum().backward()
        reference.zero_grad()
        reference(inputs).square().sum().backward()
        for (name, found), expected in zip(
            net.named_parameters(), reference.parameters(), strict=True
        ):
            assert expected.grad is not None
            dist.all_reduce(expected.grad.div_(size))
            torch.testing.assert_close(found.grad, expected.grad, msg=name)
    return hook.seen


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
)
def test_modes_of_torch(run_ranks: Any, mode: dict[str, bool]) -> None:
    for seen in run_ranks(train, 2, mode):
        steps = sorted({step for step, *_ in seen})
        assert steps == [0, 1, 2]  # the step that failed did not count
        last = [record for record in seen if record[0] == 2]
        names = {name for *_, bucket_names in last for name in bucket_names}
        assert names == {"first.weight", "first.bias", "second.weight", "second.bias"}
        assert [is_last for *_, is_last, _ in last].count(True) >= 1


def freeze_before_registering(rank: int, size: int) -> None:
    net = Net(twice=False)
    model = TorchDistributedDataParallel(net, find_unused_parameters=True)
    net.first.requires_grad_(False)
    commhooks.register(model, "topk", warmup_steps=0)
    with pytest.raises(commhooks.CommHookError, match="when the hook was registered, found others"):
        model(torch.ones(3, 6)).sum().backward()
    other = TorchDistributedDataParallel(Net(twice=False))
    other.module.requires_grad_(False)
    with pytest.raises(commhooks.CommHookError, match="a model with parameters to average"):
        commhooks.register(other, "int8")


def test_parameters_that_were_frozen_after_wrapping(run_ranks: Any) -> None:
    """All of them had one name, the empty one."""
    run_ranks(freeze_before_registering, 2)


def train_unevenly(rank: int, size: int, hook: Any, mode: dict[str, bool]) -> list[Tensor]:
    """Return the parameters after two batches on rank 0 and five on rank 1."""
    torch.manual_seed(0)
    model = TorchDistributedDataParallel(Net(twice=False), bucket_cap_mb=0.0001, **mode)
    handle = None if hook is None else commhooks.register(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + 3 * rank):
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    assert handle is None or handle.adapter.steps == 5
    return [each.detach() for each in model.parameters()]


def compare_uneven(rank: int, size: int, mode: dict[str, bool]) -> None:
    expected = train_unevenly(rank, size, None, mode)
    for hook in (Recording(), "allreduce"):
        found = train_unevenly(rank, size, hook, mode)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("hook", "options", "message"),
    [
        ("allreduce", {"divide_by_initial_world_size": False}, "number of ranks with inputs"),
        ("push_sum", {}, "'push_sum' inside join.*has overwritten"),
    ],
)
def test_refused_in_join(run_ranks: Any, hook: str, options: dict[str, bool], message: str) -> None:
    run_ranks(refuse_uneven, 2, hook, options, message)


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch's wrapper makes a CUDA stream for mixed precision",
)
def test_torchs_mixed_precision_has_a_hook_of_its_own(run_ranks: Any) -> None:
    run_ranks(refuse_mixed_precision, 1)


def refuse_mixed_precision(rank: int, size: int) -> None:
    precision = _MixedPrecision(param_dtype=torch.bfloat16)
    model = TorchDistributedDataParallel(nn.Linear(2, 1), mixed_precision=precision)
    with pytest.raises(commhooks.CommHookError, match=r"of its own for mixed_precision.*use comm"):
        commhooks.register(model, "int8")


def refuse_uneven(rank: int, size: int, hook: str, options: dict[str, bool], message: str) -> None:
    model = TorchDistributedDataParallel(nn.Linear(2, 1, bias=False))
    commhooks.register(model, hook)
    with model.join(**options):
        loss = model(torch.ones(1, 2)).sum()
        with pytest.raises(commhooks.CommHookError, match=message):
            loss.backward()


def break_without_inputs(rank: int, size: int) -> None:
    with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
        train_unevenly(rank, size, Breaks(), {})


@dataclass
class Breaks(commhooks.CommHook):
    """Fails on rank 0 in a step for which it has no inputs."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        if comm.step == 3 and comm.rank == 0:
            raise ValueError("broken")
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


@pytest.mark.parametrize("mode", [{}, {"find_unused_parameters": True}])
def test_ranks_without_inputs_take_part(run_ranks: Any, mode: dict[str, bool]) -> None:
    run_ranks(compare_uneven, 2, mode)


def test_all_ranks_raise_if_one_without_inputs_fails(run_ranks: Any) -> None:
    run_ranks(break_without_inputs, 2)


def make_skipping(hook: commhooks.CommHook, parameters: dict[str, torch.Tensor]) -> Trainer:
    """Torch's wrapper with a bucket per parameter; it leaves out the buckets of unused ones."""
    return Trainer(
        hook,
        parameters,
        torch_ddp=True,
        bucket_cap_mb=1e-6,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
    )


def leave_out(rank: int, size: int) -> None:
    """Torch leaves out the bucket that it numbers 0."""
    names = ("first", "second", "third")
    ones = {name: torch.ones(3) for name in names}
    inner = Recording()
    hook = commhooks.create("skip_nonfinite", inner=inner)
    trainer = make_skipping(hook, ones)
    for _ in range(2):
        trainer.step(ones)
    left_out = next(record[3][0] for record in inner.seen if record[:2] == (1, 0))
    used = {name: tensor for name, tensor in ones.items() if name != left_out}
    bad = {name: tensor / (rank if name == left_out else 1) for name, tensor in ones.items()}
    trainer.step(bad)
    assert trainer.handle.stats().metrics["last_step_was_skipped"] == 1
    trainer.step(used)
    metrics = trainer.handle.stats().metrics
    assert (metrics["skipped_steps"], metrics["last_step_was_skipped"]) == (1, 0)
    inner.broken = rank == 0
    with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
        trainer.step(used)
    inner.broken = False
    sound = [record[:3] for record in inner.seen if record[0] == 3]
    inner.seen.clear()  # of the step that failed as many buckets as had begun
    trainer.step(used)
    sound += [record[:3] for record in inner.seen]
    assert sound == [(3, 0, False), (3, 1, True), (4, 0, False), (4, 1, True)]
    assert trainer.handle.state_dict()["step"] == 5


def test_the_first_bucket_may_be_left_out(run_ranks: Any) -> None:
    """Steps were not counted then, and errors not raised."""
    run_ranks(leave_out, 2)


@dataclass
class FailsLate(commhooks.CommHook):
    """The average; in the second bucket an error on rank 0, when it has sent everything."""

    broken: bool = field(default=False, init=False, compare=False)
    marked: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.marked.append(bucket.is_last())
        average = await comm.all_reduce(bucket.buffer().div_(comm.size))
        if self.broken and comm.rank == 0 and bucket.index() == 1:
            raise ValueError("broken")
        return average


def leave_out_the_last(rank: int, size: int) -> None:
    names = ("first", "second", "third")
    ones = {name: torch.ones(3) for name in names}
    hook = FailsLate()
    trainer = make_skipping(hook, ones)
    for _ in range(2):
        trainer.step(ones)
    order: list[list[bool]] = []
    for left_out in names:
        hook.marked.clear()
        used = {name: tensor for name, tensor in ones.items() if name != left_out}
        trainer.step(used)
        order.append(list(hook.marked))
        if True not in hook.marked:
            hook.broken = True
            with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
                trainer.step(used)
            hook.broken = False
            trainer.step(used)
    assert sorted(order) == [[False, False], [False, True], [False, True]]
    assert all(bucket.names for bucket in trainer.handle.stats().buckets)


def test_a_failure_in_a_step_without_its_last_bucket_ends_it_on_all_ranks(run_ranks: Any) -> None:
    run_ranks(leave_out_the_last, 2)


class Reentrant(nn.Module):
    """Each layer's gradients come in a backward of its own, within the whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        return hidden


def recompute(rank: int, size: int) -> None:
    model = TorchDistributedDataParallel(Reentrant(), bucket_cap_mb=0.0001)
    hook = Recording()
    commhooks.register(model, hook)
    inputs = torch.ones(2, 6, requires_grad=True)
    for step in range(3):
        hook.broken = step == 2
        if hook.broken:
            with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
                model(inputs).sum().backward()
        else:
            model(inputs).sum().backward()
    assert [record[:3] for record in hook.seen] == [
        (0, 0, True),
        (1, 0, False),
        (1, 1, False),
        (1, 2, True),
    ]


def test_backwards_within_backward_are_one_step(run_ranks: Any) -> None:
    run_ranks(recompute, 2)


@dataclass
class BreaksAtTheEnd(commhooks.CommHook):
    """Fails once on rank 0, in step 2, when the other rank has sent everything."""

    seen: list[tuple[int, int]] = field(default_factory=list, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.seen.append((comm.step, bucket.index()))
        average = await comm.all_reduce(bucket.buffer().div_(comm.size))
        is_first_try = self.seen.count((2, 0)) == 1
        if is_first_try and comm.rank == 0 and bucket.is_last():
            time.sleep(0.2)  # the other rank is at the end of its backward
            raise ValueError("broken")
        return average


def finalize_later(rank: int, size: int, wrapper: Any, is_pair: bool) -> None:
    torch.manual_seed(0)
    net = Net(twice=False)
    model = wrapper(net, bucket_cap_mb=0.0001)
    hook = BreaksAtTheEnd()
    if is_pair:
        model.register_comm_hook(commhooks.CommHookState(hook, module=net), commhooks.comm_hook)
    else:
        commhooks.register(model, hook)
    model.require_manual_backward_finalization = True
    for step in range(4):
        loss = model(torch.full((1, 6), rank + 1.0)).sum()
        if step == 2:
            with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
                loss.backward()
        else:
            loss.backward()
        model.finalize_backward()
        gradient = net.first.weight.grad
        assert gradient is not None
        assert step == 2 or same_on_all_ranks(gradient)
        model.zero_grad()
    steps = [step for step, index in hook.seen if index == 0]
    assert steps == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("wrapper", "is_pair"),
    [
        (TorchDistributedDataParallel, False),
        (TorchDistributedDataParallel, True),
        (commhooks.DistributedDataParallel, True),
    ],
)
def test_finalizing_by_hand(run_ranks: Any, wrapper: Any, is_pair: bool) -> None:
    """Errors were lost, and steps did not count."""
    if not hasattr(wrapper, "finalize_backward"):
        pytest.skip("torch 2.15 has it")
    if wrapper is commhooks.DistributedDataParallel and not ENGINE.is_compiled:
        pytest.skip("commhooks.DistributedDataParallel needs the extension")
    run_ranks(finalize_later, 2, wrapper, is_pair)


def accumulate(rank: int, size: int) -> None:
    torch.manual_seed(0)
    net = Net(twice=False)
    model = TorchDistributedDataParallel(net)
    hook = Recording()
    commhooks.register(model, hook)
    with model.no_sync():
        model(torch.ones(1, 6)).sum().backward()
    assert hook.seen == []
    model(torch.ones(1, 6)).sum().backward()
    assert len(hook.seen) == 1


def test_no_sync(run_ranks: Any) -> None:
    run_ranks(accumulate, 2)


def drop_while_a_thread_goes_on(rank: int, size: int) -> None:
    model = TorchDistributedDataParallel(nn.Linear(2, 1, bias=False))
    adapter = TorchDDPAdapter(model)
    pending: torch.futures.Future[Tensor] = torch.futures.Future()
    adapter.install(lambda bucket: pending)
    parameters = list(model.module.parameters())
    bucket = commhooks.GradBucket(torch.zeros(2), parameters, ["weight"], is_last=False)
    answer = adapter.run(bucket)
    completed, dropped = threading.Event(), threading.Event()
    answer.add_done_callback(lambda _: (completed.set(), dropped.wait(30)))  # type: ignore[arg-type]
    backend = threading.Thread(target=pending.set_result, args=(torch.ones(2),))
    backend.start()
    assert completed.wait(30)
    alive = weakref.ref(adapter)
    del model, adapter
    gc.collect()
    try:
        assert alive() is None
    finally:
        dropped.set()
        backend.join()
    assert answer.value().tolist() == [1, 1]


def test_threads_of_a_backend_keep_no_process_group(run_ranks: Any) -> None:
    """It would be destroyed by a thread that it waits for, which ends the process."""
    run_ranks(drop_while_a_thread_goes_on, 1)
