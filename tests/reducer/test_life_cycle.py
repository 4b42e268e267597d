"""Pickling, copies, inference, frozen parameters, threads, forks, and deleted wrappers."""

import copy
import gc
import io
import multiprocessing
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.dying_ranks import set_timeout
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel, peers
from reducer.mixed_precision import MixedPrecision

WRAPPERS = (DistributedDataParallel, TorchDDP)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def gradient_is_mean(model: nn.Module, rank: int, world_size: int) -> bool:
    model.zero_grad()
    model(torch.full((1, 4), float(rank))).sum().backward()
    return bool(
        torch.allclose(model.module.second.bias.grad, torch.ones(2))
        and torch.allclose(
            model.module.first.weight.grad,
            model.module.second.weight.sum(0)[:, None] * (world_size - 1) / 2,
        )
    )


def of_all_ranks(model: nn.Module, world_size: int) -> list[torch.Tensor]:
    """Return the parameters of all ranks."""
    flat = nn.utils.parameters_to_vector(model.parameters())
    of_ranks = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(of_ranks, flat)
    return of_ranks


def pickling(rank: int, world_size: int, options: dict[str, Any]) -> None:
    model = DistributedDataParallel(Net(), **options)
    commhooks.register(model, "allreduce")
    assert gradient_is_mean(model, rank, world_size)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert list(other.state_dict()) == [f"module.{name}" for name in Net().state_dict()]
        with other.no_sync():
            other(torch.ones(1, 4)).sum().backward()
        for _ in range(3):
            assert gradient_is_mean(other, rank, world_size)
        assert (other.reducer.transport is None) == (model.reducer.transport is None)
        assert commhooks.handle_of(other) is None
        commhooks.register(other, "allreduce")
        assert gradient_is_mean(other, rank, world_size)
    own = dist.new_group([0, 1])
    of_key = {"group_key": lambda name, _: name[:5] == "first", "key_process_groups": {True: own}}
    for grouped in ({"process_group": own}, of_key):
        with pytest.raises(RuntimeError, match="default process group"):
            copy.deepcopy(DistributedDataParallel(Net(), **grouped))


@pytest.mark.parametrize("options", [{}, {"static_graph": True, "gradient_as_bucket_view": True}])
def test_pickling_and_deep_copies(options: dict[str, Any]) -> None:
    run_ranks(pickling, 2, options)


def copy_on_one_rank(rank: int, world_size: int, kind: type[nn.Module], hook: str | None) -> None:
    model = kind(Net())
    if hook is not None:
        commhooks.register(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        model(torch.full((1, 4), rank + 1.0)).square().sum().backward()
        optimizer.step()
        model.zero_grad()
        if rank == 1 and step == 1:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            for each in (copy.deepcopy(model), AveragedModel(model), loaded):
                other = each.module if isinstance(each, AveragedModel) else each
                assert list(other.state_dict()) == list(model.state_dict())
                # Torch's wrapper would broadcast buffers if it were called itself.
                called = each.eval() if kind is DistributedDataParallel else other.module
                with torch.no_grad():
                    assert torch.equal(called(torch.ones(1, 4)), model.module(torch.ones(1, 4)))
    of_ranks = of_all_ranks(model, world_size)
    assert all(torch.equal(of_ranks[0], theirs) for theirs in of_ranks)


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("hook", [None, "int8", "powersgd", "topk"])
def test_a_copy_on_one_rank_needs_no_other(kind: type[nn.Module], hook: str | None) -> None:
    run_ranks(copy_on_one_rank, 3, kind, hook)


def train_a_copy_alone(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net())
    set_timeout(2.0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        try:
            copy.deepcopy(model)(torch.ones(1, 4))
        finally:
            store.set("rank 0 has trained a copy", "")
    else:
        store.wait(["rank 0 has trained a copy"])


def test_a_copy_that_one_rank_trains_names_the_others() -> None:
    what = r"\[rank 0\] the first step of a copied model, which all ranks train, failed: rank 1 "
    with pytest.raises(commhooks.CommHookPeerError, match=what):
        run_ranks(train_a_copy_alone, 2)


def train_a_copy_in_place_of_the_original(rank: int, world_size: int, steps_before: int) -> str:
    model = DistributedDataParallel(Net())
    for _ in range(steps_before):
        model(torch.ones(1, 4)).sum().backward()
    set_timeout(2.0)
    with (
        pytest.raises(commhooks.CommHookPeerError) as error,
        patch.multiple(peers, _GRACE_SECONDS=20.0, _STORE_SECONDS=25.0),  # until all have failed
    ):
        (copy.deepcopy(model) if rank == 0 else model)(torch.ones(1, 4)).sum().backward()
    return str(error.value)


@pytest.mark.parametrize("steps_before", [1, 3])
def test_a_copy_that_one_rank_trains_names_ranks_that_train_the_original(steps_before: int) -> None:
    text = run_ranks(train_a_copy_in_place_of_the_original, 3, steps_before)[0]
    assert "a copied model, which all ranks train, failed: ranks 1, 2 failed, left or did" in text


def halved(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2)


def train_copies_with_hooks(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """A hook that a copy gets before its first step averages as on a new wrapper, from then on."""
    for hook in (None, "int8", "powersgd", "bf16", halved):
        trained = []
        for copied in (False, True):
            model: nn.Module = DistributedDataParallel(Net(), **options)
            model = copy.deepcopy(copy.deepcopy(model)) if copied else model
            if callable(hook):
                model.register_comm_hook(None, hook)
            elif hook is not None:
                commhooks.register(model, hook)
            name = model.comm_hook_name
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            for step in range(3):
                model(torch.full((1, 4), rank + step + 1.0)).square().sum().backward()
                optimizer.step()
                model.zero_grad()
            assert model.comm_hook_name == name
            packed = [counts["packed_bytes"] for counts in model.reducer.bucket_stats()]
            trained.append((of_all_ranks(model, world_size), packed))
        (new, of_new), (of_copy, packed) = trained
        assert torch.equal(new[0], of_copy[0])
        assert all(torch.equal(of_copy[0], theirs) for theirs in of_copy)
        assert packed == of_new


@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
        {"gradient_as_bucket_view": True, "lazy_bucket_allocation": True},
    ],
)
def test_copies_keep_a_hook_that_is_registered_before_their_first_step(
    options: dict[str, Any],
) -> None:
    run_ranks(train_copies_with_hooks, 3, options)


def buffers_of_copies(rank: int, world_size: int) -> None:
    for kind in WRAPPERS:
        model = kind(Net())
        model(torch.ones(1, 4)).sum().backward()
        model.module.seen.fill_(rank + 1.0)
        other = copy.deepcopy(model)
        other(torch.ones(1, 4)).sum().backward()
        assert other.module.seen.item() == 1.0


def test_the_first_step_of_a_copy_broadcasts_buffers() -> None:
    run_ranks(buffers_of_copies, 2)


def update_group_of_copy(rank: int, world_size: int) -> None:
    """One rank has a copy, the other one a new wrapper, until both get the same group."""
    model = DistributedDataParallel(Net())
    model = copy.deepcopy(model) if rank == 0 else model
    model._update_process_group(dist.new_group([0, 1]))
    for _ in range(3):
        assert gradient_is_mean(model, rank, world_size)


def test_copies_take_another_process_group_before_their_first_step() -> None:
    run_ranks(update_group_of_copy, 2)


def copy_of_shards(rank: int, world_size: int) -> None:
    """Torch refuses, with a hook as without one."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    for hook in (None, "int8"):
        model = fully_shard(Net(), mesh=mesh)
        if hook is not None:
            commhooks.register(model, hook)
        model(torch.ones(1, 4)).sum().backward()
        for copying in (copy.deepcopy, AveragedModel):
            with pytest.raises(AssertionError, match="does not support deepcopy"):
                copying(model)


def test_sharded_models_cannot_be_copied() -> None:
    run_ranks(copy_of_shards, 2)


def join_with_copies(rank: int, world_size: int) -> None:
    """A rank without inputs takes part in the first step of a copy; another copy needs nobody."""
    model = copy.deepcopy(DistributedDataParallel(Net()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for _ in range(3 * rank):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            model.zero_grad()
            with torch.no_grad():
                copy.deepcopy(model)(torch.ones(1, 4))
    of_ranks = of_all_ranks(model, world_size)
    assert torch.equal(of_ranks[0], of_ranks[1])


def test_copies_take_part_in_join() -> None:
    run_ranks(join_with_copies, 2)


def state_dicts(rank: int, world_size: int) -> None:
    ours, theirs = (wrapper(Net()) for wrapper in WRAPPERS)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def test_state_dicts_are_torchs() -> None:
    run_ranks(state_dicts, 1)


def inference(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net())
    x = torch.full((1, 4), float(rank))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not model(x).requires_grad
    model.eval()
    assert not model.module.training
    model(x).sum().backward()  # gradients are averaged in evaluation mode too
    assert torch.equal(model.module.second.bias.grad, torch.ones(2))
    model.train()
    assert model.module.training
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert gradient_is_mean(model, rank, world_size)


def test_inference_and_evaluation() -> None:
    run_ranks(inference, 2)


def frozen(rank: int, world_size: int) -> None:
    module = Net()
    module.first.requires_grad_(False)
    model = DistributedDataParallel(module)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 4), float(rank))).sum().backward()
        assert module.first.weight.grad is None
        assert torch.equal(module.second.bias.grad, torch.ones(2))
    module.first.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r'"first\.bias" .* requires a gradient now.* wrap'):
        model(torch.ones(1, 4))
    module.first.requires_grad_(False)
    module.second.bias.requires_grad_(False)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"requires_grad was switched off for second\.bias"):
        model(torch.ones(1, 4))
    module.second.bias.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()


def frozen_for_a_while(rank: int, world_size: int) -> None:
    """A discriminator is frozen while the generator is trained; torch allows it too."""
    for options in ({}, {"find_unused_parameters": True}):
        model = DistributedDataParallel(Net(), **options)
        for step in range(4):
            model.requires_grad_(step % 2 == 0)
            x = torch.full((1, 4), float(rank), requires_grad=True)
            model.zero_grad()
            model(x).sum().backward()
            assert (model.module.second.bias.grad is None) == (step % 2 == 1)
            if step % 2 == 0:
                assert torch.equal(model.module.second.bias.grad, torch.ones(2))


def test_a_model_may_be_frozen_completely() -> None:
    run_ranks(frozen_for_a_while, 2)


def test_changing_requires_grad_raises() -> None:
    run_ranks(frozen, 2)


def count_threads() -> int:
    """Count the threads of this process, also those of Gloo and of the engine."""
    return len(list(Path("/proc/self/task").iterdir()))


def delete(rank: int, world_size: int, hook: str | None) -> None:
    module = Net()
    for wrapping in range(200 if hook is None else 20):
        model = DistributedDataParallel(module)
        if hook is not None:
            commhooks.register(model, hook)
        if wrapping % 10 == 0:
            assert gradient_is_mean(model, rank, world_size)
        reducer = weakref.ref(model.reducer)
        del model
        if reducer() is not None:
            gc.collect()
        assert reducer() is None
        if wrapping == 0:
            threads = count_threads()
    module.zero_grad()
    module(torch.full((1, 4), float(rank))).sum().backward()
    of_ranks = [torch.empty(4, 4) for _ in range(world_size)]
    dist.all_gather(of_ranks, module.first.weight.grad)
    assert not torch.equal(*of_ranks)  # no hook averages any longer
    # Some are still ending. One that stays for each wrapper makes 19 more, or 199.
    assert count_threads() < threads + 10


@pytest.mark.parametrize("hook", [None, "powersgd"])
def test_deleted_wrappers_are_freed_and_leave_the_module(hook: str | None) -> None:
    run_ranks(delete, 2, hook)


def in_threads(rank: int, world_size: int) -> None:
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    models = [DistributedDataParallel(Net(), process_group=group) for group in groups]
    failures: list[BaseException] = []

    def train(model: nn.Module) -> None:
        try:
            for _ in range(20):
                assert gradient_is_mean(model, rank, world_size)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_two_threads_train_two_models() -> None:
    run_ranks(in_threads, 2)


def replace_and_read(rank: int, world_size: int) -> None:
    """One thread replaces Python hooks, whose destruction takes the GIL; another thread reads."""
    model = DistributedDataParallel(Net())

    def replace() -> None:
        for _ in range(3000):
            model.reducer.set_hook(lambda bucket: torch.futures.Future())
            model.reducer.set_observer(lambda indices: None)

    thread = threading.Thread(target=replace)
    thread.start()
    while thread.is_alive():
        assert model.reducer.steps == 0
    thread.join()


def test_a_model_can_be_read_while_its_hook_is_replaced() -> None:
    run_ranks(replace_and_read, 1)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.failing = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.launching = nn.Linear(4, 4)  # the first bucket


def fail_beside_a_launch(rank: int, world_size: int) -> None:
    """One thread's backward fails while another's is in the hook of the first bucket."""
    model = DistributedDataParallel(Pair(), bucket_cap_mb=1e-6)
    under_way, futures = [threading.Event(), threading.Event()], []

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        under_way[1].set()
        time.sleep(0.2)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        futures.append(future)
        threading.Timer(0.2, future.set_result, [bucket.buffer()]).start()
        return future

    def fail(gradient: torch.Tensor) -> None:
        under_way[0].set()
        assert under_way[1].wait(60)
        raise ValueError("in user code")

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model.module.failing[0](x)
        hidden.register_hook(fail)
        return model.module.failing[1](hidden).sum(), model.module.launching(x).sum()

    model.register_comm_hook(None, hook)
    model.module.forward = forward
    failing, launching = model(torch.ones(1, 4))

    def launch() -> None:
        assert under_way[0].wait(60)
        launching.backward()

    thread = threading.Thread(target=launch)
    thread.start()
    with pytest.raises(ValueError, match="in user code"):
        failing.backward()
    assert futures
    assert futures[0].done()  # no hook works on the bucket any longer
    thread.join()


def test_a_failure_waits_for_hooks_of_other_threads() -> None:
    run_ranks(fail_beside_a_launch, 1)


def data_loader(rank: int, world_size: int, method: str) -> None:
    # The ranks of these tests are daemon processes, which may not have children.
    multiprocessing.current_process()._config["daemon"] = False
    model = DistributedDataParallel(Net())
    commhooks.register(model, "powersgd", start_step=0)
    data = TensorDataset(torch.ones(8, 4))
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=method)
    plain = Net()
    for (x,) in loader:
        model.zero_grad()
        model(x + rank).sum().backward()
        plain.zero_grad()
        for peer in range(world_size):
            (plain(x + peer).sum() / world_size).backward()
        for ours, mean in zip(model.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, mean.grad)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_data_loader_workers(method: str) -> None:
    run_ranks(data_loader, 2, method)


def alone(rank: int, world_size: int, hook: str | None) -> None:
    """World size 1, and a group of one rank among several."""
    groups = [dist.new_group([peer]) for peer in range(world_size)]
    model = DistributedDataParallel(Net(), process_group=groups[rank])
    reference = Net()
    if hook is not None:
        commhooks.register(model, hook)
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        for m in (model, reference):
            m(torch.full((1, 4), float(rank + 1))).square().sum().backward()
        for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
            if hook in (None, "allreduce"):
                assert torch.equal(ours.grad, theirs.grad)
            else:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("hook", [None, "allreduce", "bf16", "powersgd"])
def test_groups_of_one_rank(size: int, hook: str | None) -> None:
    run_ranks(alone, size, hook)


def drop_after_the_group(rank: int, size: int) -> None:
    """The thread of Gloo waits for the GIL while the model drops the last owner of the group."""
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    has_begun = threading.Event()

    def call_back(_: object) -> None:
        has_begun.set()
        time.sleep(0.5)  # without the GIL

    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    assert work is not None
    future = work.get_future().then(call_back)
    has_begun.wait()
    dist.destroy_process_group(group)
    del group, work
    dropped = weakref.ref(model)
    del model
    gc.collect()
    assert dropped() is None
    future.wait()


def test_a_model_may_outlive_its_process_group(run_ranks: Any) -> None:
    run_ranks(drop_after_the_group, 2)
