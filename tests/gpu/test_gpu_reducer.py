"""The reducer on CUDA: the same gradients as torch DDP, no waiting, correct stream order."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.no_waiting import waiting_is_an_error
from support.several_ranks import PATIENCE, WAYS, Mixed, equals_torchs
from torch import Tensor, nn

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel, GradBucket

CYCLES = 20_000_000  # of torch.cuda._sleep: about ten milliseconds


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equals_torchs_with_one_rank_on_nccl(dtype: torch.dtype, way: str) -> None:
    run_ranks(equals_torchs, 1, "cuda", dtype, way, backend="nccl", timeout=PATIENCE)


@pytest.mark.parametrize("way", WAYS)
def test_equals_torchs_with_two_ranks_on_one_device(way: str) -> None:
    run_ranks(equals_torchs, 2, "cuda", torch.float32, way, timeout=PATIENCE)


# ------------------------------------------------------------------------------------ streams


@dataclass
class Slow(commhooks.CommHook):
    """Keeps its stream busy for a while, then returns a constant."""

    value: float = 3.0

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        torch.cuda._sleep(CYCLES)
        wire = await comm.all_reduce(bucket.buffer())
        return wire.fill_(self.value)


@dataclass
class Plain(commhooks.CommHook):
    """The average, computed by a coroutine."""

    capturable_from = 0

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        return (await comm.all_reduce(bucket.buffer())).div_(comm.size)


def backward_waits_for_the_hook(rank: int, size: int, view: bool) -> None:
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda(),
        bucket_cap_mb=0.001,
        gradient_as_bucket_view=view,
    )
    commhooks.register(model, Slow())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            # Read on the stream that called backward, which has not been synchronized.
            copies = [p.grad.clone() for p in model.parameters()]
    stream.synchronize()
    assert all(torch.all(copy == 3.0) for copy in copies)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (2, "gloo")])
def test_backward_waits_for_the_hook(size: int, backend: str, view: bool) -> None:
    run_ranks(backward_waits_for_the_hook, size, view, backend=backend, timeout=PATIENCE)


class TwoStreams(nn.Module):
    """The gradient of one parameter arrives late, on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(1000, device="cuda"))
        self.early = nn.Parameter(torch.ones(1000, device="cuda"))
        self.stream = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            late = Sleep.apply(x * self.late)
        early = x * self.early
        here.wait_stream(self.stream)
        return late + early


class Sleep(torch.autograd.Function):
    """The identity with a slow backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return gradient.clone()


def packs_what_all_streams_computed(rank: int, size: int) -> None:
    model = DistributedDataParallel(TwoStreams())
    commhooks.register(model, Plain())
    for step in range(4):
        model.zero_grad()
        model(torch.full((1000,), step + 1.0, device="cuda")).sum().backward()
        for parameter in model.parameters():
            assert torch.all(parameter.grad == step + 1.0)


@pytest.mark.filterwarnings("ignore:.*stream does not match.*:UserWarning")
def test_packs_what_all_streams_computed() -> None:
    run_ranks(packs_what_all_streams_computed, 1, backend="nccl", timeout=PATIENCE)


def hook_overlaps_backward(rank: int, size: int) -> None:
    """Check that the hook's kernels overlap with those of backward, on another stream."""
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda(),
        bucket_cap_mb=16,
    )
    commhooks.register(model, Slow())
    x = torch.randn(4096, 2048, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        model(x).sum().backward()
        torch.cuda.synchronize()
    kernels = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    spins = [event.time_range for event in kernels if "spin" in event.name]
    products = [
        event.time_range
        for event in kernels
        if any(word in event.name for word in ("gemm", "cutlass", "nvjet"))
    ]
    assert spins, {event.name for event in kernels}
    assert products, {event.name for event in kernels}
    first = min(spins, key=lambda span: span.start)
    assert any(span.start < first.end and first.start < span.end for span in products)


def test_hook_overlaps_backward() -> None:
    run_ranks(hook_overlaps_backward, 1, backend="nccl", timeout=PATIENCE)


# ------------------------------------------------------------------------- no waiting


WITH_OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"rank": 2, "start_step": 0, "min_compression_rate": 1.0},
    "batched_powersgd": {"rank": 2, "start_step": 0, "min_compression_rate": 1.0},
    "cast": {"inner": "allreduce"},
    "diloco": {"period": 2, "fragments": 2, "delay": 1},
    "error_feedback": {"inner": "bf16"},
    "guard": {"inner": "int8", "max_error": 0.1, "every": 1},
    "gossip": {"average_every": 2},
    "hierarchical": {"inner": "allreduce", "ranks_per_node": 1},
    "local_sgd": {"period": 2},
    "route": {"rules": [["*", "allreduce"]]},
    "schedule": {"stages": [[0, "allreduce"], [1, "bf16"]]},
    "skip_nonfinite": {"inner": "allreduce"},
}
LOOKS_AT_GRADIENTS = {"threshold"}  # which decide what it sends, so the host waits


def steps_without_synchronizing(rank: int, size: int, name: str, options: dict[str, Any]) -> None:
    model = DistributedDataParallel(Mixed().cuda(), bucket_cap_mb=0.001)
    commhooks.register(model, name, **options)
    x = torch.randn(4, 3, 8, 8, device="cuda")
    for _ in range(4):  # buckets are rebuilt, kernels loaded and state created
        model(x).sum().backward()
    with waiting_is_an_error():
        for _ in range(3):
            model(x).sum().backward()


@pytest.mark.parametrize("name", sorted(set(commhooks.available()) - LOOKS_AT_GRADIENTS))
def test_steps_without_synchronizing(name: str) -> None:
    options = WITH_OPTIONS.get(name, {})
    run_ranks(steps_without_synchronizing, 1, name, options, backend="nccl", timeout=PATIENCE)


def all_used_without_synchronizing(rank: int, size: int) -> None:
    model = DistributedDataParallel(Mixed().cuda(), find_unused_parameters=True)
    x = torch.randn(4, 3, 8, 8, device="cuda")
    for _ in range(4):
        model(x).sum().backward()
    with waiting_is_an_error():
        model(x).sum().backward()


def test_all_used_without_synchronizing() -> None:
    """Only a rank that did not use a parameter has to learn about the other ranks."""
    run_ranks(all_used_without_synchronizing, 1, backend="nccl", timeout=PATIENCE)


# -------------------------------------------------------------------------------------- graphs

CAPTURED: dict[str, Any] = {
    "average": None,
    "coroutine": Plain(),
    "fp16": {"name": "cast", "inner": "allreduce", "dtype": "float16"},
    "routed": {"name": "route", "rules": [["0.*", "bf16"]], "default": "allreduce"},
}


def captured_step(rank: int, size: int, hook: Any) -> None:
    """See docs/how-a-gradient-travels.md, CUDA graphs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 7)).cuda(),
            bucket_cap_mb=0.001,
            stable_buckets=True,
        )
        if hook is not None:
            commhooks.register(model, hook)
        x = torch.randn(16, 32, device="cuda")
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        model(x).square().mean().backward()
    for seed in (1, 2):
        x.copy_(torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        loss = model.module(x).square().mean()
        wanted = torch.autograd.grad(loss, list(model.module.parameters()))
        for one, other in zip(found, wanted, strict=True):
            if hook is None or isinstance(hook, Plain):
                torch.testing.assert_close(one, other)
            else:
                assert (one - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("hook", CAPTURED)
def test_whole_step_in_a_graph(hook: str, size: int) -> None:
    """The inputs of all ranks are the same, and so are the averages."""
    run_ranks(captured_step, size, CAPTURED[hook], backend="nccl", timeout=PATIENCE)


def refused_capture(rank: int, size: int) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(nn.Linear(32, 32).cuda(), stable_buckets=True)
        commhooks.register(model, "qsgd")
        x = torch.randn(16, 32, device="cuda")
        for _ in range(5):
            model(x).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(commhooks.CommHookError, match="cannot capture hook QSGD"),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        model(x).sum().backward()


def test_a_graph_refuses_hooks_whose_steps_differ() -> None:
    run_ranks(refused_capture, 1, backend="nccl", timeout=PATIENCE)


# ------------------------------------------------------------------------- other features


def optimizer_in_backward(rank: int, size: int) -> None:
    from reducer import overlap_optimizer

    torch.manual_seed(0)
    reference = Mixed().cuda()
    model = DistributedDataParallel(Mixed().cuda(), bucket_cap_mb=0.001)
    model.module.load_state_dict(reference.state_dict())
    commhooks.register(model, Plain())
    overlap_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step)).cuda()
        model(x).square().mean().backward()
        plain.zero_grad()
        reference(x).square().mean().backward()
        plain.step()
    for found, wanted in zip(model.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_optimizer_in_backward() -> None:
    run_ranks(optimizer_in_backward, 1, backend="nccl", timeout=PATIENCE)


def one_rank_uses_a_parameter(rank: int, size: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.none = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.one if rank == 0 else self.other)(x)

    model = DistributedDataParallel(Branches().cuda(), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 4, device="cuda")).sum().backward()
        assert torch.all(model.module.one.weight.grad == 0.5)
        assert torch.all(model.module.other.weight.grad == 0.5)
        assert model.module.none.weight.grad is None


def test_one_rank_uses_a_parameter() -> None:
    run_ranks(one_rank_uses_a_parameter, 2, backend="gloo", timeout=PATIENCE)


def buffers_are_broadcast(rank: int, size: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    model = DistributedDataParallel(module)
    for _ in range(3):
        model(torch.randn(8, 4, device="cuda") + rank).sum().backward()
    model(torch.zeros(8, 4, device="cuda"))
    means = [torch.empty(4, device="cuda") for _ in range(size)]
    dist.all_gather(means, module[1].running_mean)
    assert torch.equal(means[0], means[-1])


def test_buffers_are_broadcast() -> None:
    run_ranks(buffers_are_broadcast, 2, backend="gloo", timeout=PATIENCE)
