"""Logging data, profiler ranges, the table of buckets, warnings."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.cluster.group import join_group, local_store
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel

# Keys of torch that do not apply here; most describe fusions of NCCL and GPU timers.
EXPECTED_MISSING = {
    "can_set_static_graph",
    "graph_static",
    "forward_compute_time_start",
    "backward_compute_time_start",
    "backward_compute_time_end",
    "backward_comm_time_start",
    "backward_comm_time_end",
    "join_uneven_inputs",
    "prev_iteration_grad_ready_order_indices",
    "first_bucket_bytes_cap",
    "num_iterations",
    "num_buckets_reduced",
    "gloo_num_threads",
    "num_parameter_tensors",
}


def make_model(wrapper: type[nn.Module] = DistributedDataParallel) -> nn.Module:
    torch.manual_seed(0)
    return wrapper(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=0.00007)


def logging_data(rank: int, world_size: int) -> None:
    of_wrappers = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        model = make_model(wrapper)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
        of_wrappers.append(model._get_ddp_logging_data())
    ours, theirs = of_wrappers
    for key in (
        "module_name",
        "backend_name",
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
        "has_rebuilt_buckets",
    ):
        assert ours[key] == theirs[key], key
    missing = {key for key in theirs if not key.startswith(("nccl_", "rebuilt_", "initial_"))}
    assert missing - ours.keys() <= EXPECTED_MISSING, sorted(missing - ours.keys())
    assert ours["torch_distributed_debug"] == "OFF"
    assert ours["comm_hook"] == "average"
    assert ours["iteration"] == 4
    assert ours["avg_forward_compute_time"] > 0
    assert ours["avg_backward_compute_time"] > 0
    assert ours["avg_backward_comm_time"] > 0
    assert ours["rebuilt_bucket_sizes"] == "80, 80"


def test_logging_data_has_torchs_keys() -> None:
    run_ranks(logging_data, 2)


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


def profile(rank: int, world_size: int) -> list[str]:
    model = make_model()
    commhooks.register(model, "powersgd", rank=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.ones(2, 4)).sum().backward()
    return [event.key for event in profiler.key_averages()]


@pytest.mark.filterwarnings("ignore")
def test_profiler_ranges_name_bucket_and_hook() -> None:
    for keys in run_ranks(profile, 2):
        assert "DistributedDataParallel.forward" in keys
        assert "commhooks: powersgd, bucket 0" in keys
        assert "commhooks: powersgd, bucket 1" in keys
        assert "commhooks: wait for all buckets" in keys


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
        for hook in ("allreduce", "powersgd", "int8", "topk"):
            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            commhooks.register(model, hook)
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
            gradient = model.module.bias.grad
            assert torch.allclose(gradient, torch.full((64,), 2.0), atol=0.05) or hook == "topk"
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
