"""Logging data, profiler ranges, the table of buckets, warnings."""

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.cluster.group import join_group, local_store
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel


def make_model(wrapper: Any = DistributedDataParallel, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return wrapper(net, bucket_cap_mb=0.00007, **options)


SAME_AS_IN_TORCH = (
    "module_name",
    "backend_name",
    "gloo_num_threads",
    "world_size",
    "rank",
    "bucket_cap_bytes",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "has_sync_bn",
    "num_parameter_tensors",
    "total_parameter_size_bytes",
    "is_multi_device_module",
    "output_device",
    "dtypes",
    "has_rebuilt_buckets",
    "prev_iteration_grad_ready_order_indices",
    "torch_distributed_debug",
    "iteration",
)


def logging_data(rank: int, world_size: int) -> None:
    before = time.time_ns()
    of_wrappers = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        model = make_model(wrapper)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4))
        of_wrappers.append(model._get_ddp_logging_data())
    ours, theirs = of_wrappers
    for key in SAME_AS_IN_TORCH:
        assert ours[key] == theirs[key], key
    assert theirs.keys() - ours.keys() == set()
    assert ours["rebuilt_bucket_sizes"] == "80, 80"
    assert ours["rebuilt_per_bucket_param_indices"] == "3 2, 1 0"
    assert ours["num_buckets_reduced"] == 2
    for key in ("forward_compute", "backward_compute", "backward_comm"):
        assert ours[f"avg_{key}_time"] > 0
    points = [
        "forward_compute_time_start",
        "backward_compute_time_start",
        "backward_comm_time_start",
        "backward_comm_time_end",
    ]
    times = [before, *(ours[point] for point in points), time.time_ns()]
    assert times == sorted(times)


def test_logging_data_has_torchs_keys() -> None:
    run_ranks(logging_data, 2)


def my_hook(state: object, bucket: commhooks.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise ArithmeticError("no average")


def hooks_and_errors(rank: int, world_size: int) -> None:
    model = make_model()
    data = model._get_ddp_logging_data
    assert not {"comm_hook", "has_error", "error"} & data().keys()
    handle = commhooks.register(model, "fp16")
    assert data()["comm_hook"] == "fp16"
    handle.replace("allreduce")
    assert data()["comm_hook"] == "allreduce"
    handle.remove()
    assert "comm_hook" not in data()
    with pytest.raises(TypeError):
        model.register_comm_hook(None, 1)
    assert data()["has_error"] == 1
    assert "must be callable" in data()["error"]
    model.register_comm_hook(None, my_hook)
    assert data()["comm_hook"] == "my_hook"
    with pytest.raises(ArithmeticError):  # from autograd's thread
        model(torch.ones(2, 4)).sum().backward()
    assert "no average" in data()["error"]

    model = make_model()
    model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    assert model._get_ddp_logging_data()["comm_hook"] == str(BuiltinCommHookType.FP16_COMPRESS)


def test_logging_data_names_the_hook_and_the_last_error() -> None:
    run_ranks(hooks_and_errors, 2)


def use_of_parameters(rank: int, world_size: int, forwards: int) -> None:
    model = make_model(find_unused_parameters=True)
    first, second = model.module
    data = model._get_ddp_logging_data
    for forward, unused, is_constant in (
        (second.forward, 80, True),
        (second.forward, 80, True),
        (first.forward, 80, False),
        (nn.Sequential(first, second).forward, 0, False),
    ):
        model.module.forward = forward
        sum(model(torch.ones(2, 4)) for _ in range(forwards)).sum().backward()
        assert data()["unused_parameter_size"] == unused
        assert data()["can_set_static_graph"] is is_constant
    assert data()["prev_iteration_grad_ready_order_indices"] == "3, 2, 1, 0"
    assert data()["has_rebuilt_buckets"]  # as the order of the first two steps was the same


@pytest.mark.parametrize("forwards", [1, 2])
def test_logging_data_tells_whether_the_graph_is_static(forwards: int) -> None:
    """Another forward before backward once hid the steps before it."""
    run_ranks(use_of_parameters, 1, forwards)


def sampling(rank: int, world_size: int) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)
    model._set_ddp_runtime_logging_sample_rate(20)
    for _ in range(42):
        model(torch.ones(2, 4)).sum().backward()
    assert model.step_sampler._samples == 10 + 2  # the first ten, then steps 20 and 40


def test_run_time_statistics_are_sampled() -> None:
    run_ranks(sampling, 2)


def profile(rank: int, world_size: int, hook: str) -> list[str]:
    model = make_model(find_unused_parameters=True)
    commhooks.register(model, hook)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.ones(2, 4)).sum().backward()
    return [event.key for event in profiler.key_averages()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", ["powersgd", "bf16"])
def test_profiler_ranges_name_bucket_and_hook(hook: str) -> None:
    for keys in run_ranks(profile, 2, hook):
        assert "DistributedDataParallel.forward" in keys
        assert f"commhooks: {hook}, bucket 0" in keys
        assert f"commhooks: {hook}, bucket 1" in keys
        assert "commhooks: wait for all buckets" in keys
        assert "commhooks: search_unused_parameters" in keys


def plan(rank: int, world_size: int) -> str:
    return make_model().bucket_plan()


def test_bucket_plan() -> None:
    assert run_ranks(plan, 2)[0] == (
        "bucket 0: 80 bytes over 2 ranks, 2 parameters\n"
        "    1.bias\n"
        "    1.weight\n"
        "bucket 1: 80 bytes over 2 ranks, 2 parameters\n"
        "    0.bias\n"
        "    0.weight"
    )


def debug_level_detail(rank: int, world_size: int, port: int) -> None:
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        join_group(rank, world_size, "127.0.0.1", port, 60.0)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert type(backend).__name__ == "_ProcessGroupWrapper"
        topk = {"name": "topk", "density": 1.0, "warmup_steps": 0}
        for hook in ("allreduce", "powersgd", "int8", topk):
            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            commhooks.register(model, hook)
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
            gradient = model.module.bias.grad
            assert torch.allclose(gradient, torch.full((64,), 2.0), atol=0.05)
        dist.barrier()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_debug_level_detail() -> None:
    """At this level torch wraps the process group, and checks every collective."""
    store = local_store()
    run_ranks(debug_level_detail, 2, store.port)


def create_graph(rank: int, world_size: int) -> None:
    model = make_model()
    with pytest.warns(UserWarning, match="create_graph=True"):
        model(torch.ones(2, 4)).square().sum().backward(create_graph=True)
    model.zero_grad()  # break the reference cycle


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_warns() -> None:
    run_ranks(create_graph, 2)


def observers(rank: int, world_size: int) -> None:
    model = make_model()
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    plain = make_model(lambda net, **_: net)
    calls: list[list[str]] = []

    def observe(parameters: Sequence[nn.Parameter]) -> None:
        assert threading.get_ident() == thread
        calls.append([names[parameter] for parameter in parameters])
        for parameter in parameters:
            torch.testing.assert_close(parameter.grad, means[names[parameter]])

    def fail(parameters: Sequence[nn.Parameter]) -> None:
        raise ArithmeticError("not these")

    thread = threading.get_ident()
    model.add_gradient_observer(observe)
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        for peer in range(world_size):
            (plain(torch.full((2, 4), peer + step + 1.0)).square().sum() / world_size).backward()
        means = {name: parameter.grad for name, parameter in plain.named_parameters()}
        model(torch.full((2, 4), rank + step + 1.0)).square().sum().backward()
    assert calls == 3 * [["1.bias", "1.weight"], ["0.bias", "0.weight"]]

    model.remove_gradient_observer(observe)
    model.add_gradient_observer(fail)
    with pytest.raises(ArithmeticError, match="not these"):
        model(torch.ones(2, 4)).sum().backward()
    model.remove_gradient_observer(fail)
    model(torch.ones(2, 4)).sum().backward()
    assert len(calls) == 6
    with pytest.raises(ValueError, match="not in list"):
        model.remove_gradient_observer(fail)


def test_observers_get_one_bucket_at_a_time_with_averaged_gradients() -> None:
    run_ranks(observers, 2)


def raise_on_rank_0(rank: int, world_size: int, hook: str) -> list[list[torch.Tensor]]:
    """Of three buckets, the first raises at once, while other ranks go on to launch the others."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=6e-5)
    handle = commhooks.register(model, hook)
    found, calls = [], []

    def fail(parameters: Sequence[nn.Parameter]) -> None:
        calls.append(parameters)
        if rank == 0:
            raise ArithmeticError("not these")

    for step in range(4):
        model.zero_grad()
        loss = model(torch.full((2, 4), rank + step + 1.0)).square().sum()
        if step == 1:
            model.add_gradient_observer(fail)
            with pytest.raises(ArithmeticError) if rank == 0 else nullcontext():
                loss.backward()
            model.remove_gradient_observer(fail)
        else:
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert handle.adapter.steps == 4
    assert len(calls) == (1 if rank == 0 else 3)
    return found


@pytest.mark.parametrize("hook", ["allreduce", "int8"])
def test_ranks_average_all_buckets_when_an_observer_raises(hook: str) -> None:
    ours, theirs = run_ranks(raise_on_rank_0, 2, hook)
    for some, others in zip(ours, theirs, strict=True):
        assert len(some) == 3
        assert all(map(torch.equal, some, others))
