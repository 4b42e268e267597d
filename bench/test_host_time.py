"""The host time of hooks for CUDA tensors, measured on a GPU, or without one and without kernels.

Without a GPU, CPU tensors stand for CUDA tensors, and launching a kernel does nothing. Torch's
operations run on the CPU, where products of small matrices take longer than their launch would.
This shows the time of Python; gpu/test_gpu_codecs.py measures launches as well.
"""

import ctypes
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import kernels
from commhooks.kernels.source import Source
from commhooks.runtime import replays, stream_runner
from commhooks.runtime.replays import Replay
from commhooks.runtime.stream_runner import StreamRunner
from reducer import GradBucket

ROUNDS = 300
WARM_UP = 50


REPLAY_AIMS = {"one collective": 40, "fp16": 40}
"""Microseconds on a device; 100 for all others."""


@dataclass
class Plain(commhooks.CommHook):
    """A hook with one collective."""

    capturable_from = 0

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        """Average the bucket."""
        return await comm.all_reduce(bucket.buffer())


POWERSGD = {"start_step": 0, "min_compression_rate": 1.0}
Shapes = list[tuple[int, ...]]
MATRIX: Shapes = [(100, 100)]
# Two layers of a transformer: four shapes of matrices, with vectors between them.
LAYERS = 2 * [(64,), (192, 64), (192,), (64, 64), (64,), (64,), (256, 64), (256,), (64, 256), (64,)]

SUBJECTS: dict[str, tuple[Callable[[], commhooks.CommHook], Shapes]] = {
    "one collective": (Plain, MATRIX),
    "fp16": (lambda: commhooks.create("fp16"), MATRIX),
    "skip_nonfinite": (lambda: commhooks.create("skip_nonfinite", inner=Plain()), MATRIX),
    "int8": (lambda: commhooks.create("int8"), MATRIX),
    "topk": (lambda: commhooks.create("topk", warmup_steps=0), MATRIX),
    "powersgd": (lambda: commhooks.create("powersgd", **POWERSGD), MATRIX),
    "powersgd, two layers": (lambda: commhooks.create("powersgd", **POWERSGD), LAYERS),
}


def runner_and_bucket(
    hook: commhooks.CommHook,
    shapes: Shapes,
    buffer: Tensor,
    group: dist.ProcessGroup,
) -> tuple[StreamRunner, GradBucket]:
    """Create a runner and a bucket whose flat gradients are ``buffer``."""
    parameters = [nn.Parameter(buffer.new_zeros(shape)) for shape in shapes]
    names = [f"parameter{i}" for i in range(len(parameters))]
    hook.prepare(dict(zip(names, parameters, strict=True)), group)
    bucket = GradBucket(buffer, parameters, names, step=1)
    return StreamRunner(hook, group, buffer.device, token=0), bucket


def measure_host_time(benchmark: Any, function: Callable[[], Any]) -> None:
    """Time calls of ``function``, each after the device has done what the others left to it."""
    gc.collect()
    settle = torch.cuda.synchronize if torch.cuda.is_initialized() else None
    benchmark.pedantic(function, setup=settle, rounds=ROUNDS, warmup_rounds=WARM_UP)
    if benchmark.stats is not None:  # it is None with --benchmark-disable
        benchmark.extra_info.update(microseconds=1e6 * benchmark.stats.stats.median)


class Nothing:
    """A backend that runs no kernel. Indices that a kernel would write are zeros."""

    def require(self, device: torch.device) -> None:
        """Do nothing: no package is needed."""

    def launch(self, _source: Source, kernel: str, *arguments: Any) -> None:
        """Do nothing but set indices to zero."""
        if "::list<" in kernel:
            _grid, _block, parameters, count, _device_index = arguments
            values = (ctypes.POINTER(ctypes.c_int64) * count).from_address(parameters)
            length, indices = (values[i].contents.value for i in (3, 4))
            ctypes.memset(indices, 0, 4 * length)


class NoGraph:
    """A CUDA graph that captures nothing."""

    def capture_begin(self, **options: Any) -> None:
        """Do nothing."""

    capture_end = replay = capture_begin


@pytest.mark.benchmark(group="host: Python per bucket and hook")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SUBJECTS)
def test_host_time(
    benchmark: Any, group: dist.ProcessGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure the host time from passing a bucket until its future is returned."""
    monkeypatch.setitem(kernels.BACKENDS, "cpu", Nothing())
    make, shapes = SUBJECTS[name]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    monkeypatch.setattr(stream_runner, "SENDS_ALONE", device == "cuda")  # as torch's hooks do
    buffer = torch.randn(sum(math.prod(shape) for shape in shapes), device=device)
    runner, bucket = runner_and_bucket(make(), shapes, buffer, group)
    runner(bucket).wait()
    measure_host_time(benchmark, lambda: runner(bucket))
    benchmark.extra_info.update(aim="at most 60 microseconds")


@pytest.mark.benchmark(group="host: a replay of a bucket")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "skip_nonfinite"])
def test_replay(
    benchmark: Any, group: dist.ProcessGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure the same for a bucket that is replayed; without a GPU, the replay does nothing."""
    monkeypatch.setattr(replays, "MAX_CAPTURES", 1)
    if dist.get_backend(group) != "nccl":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(stream_runner, "_can_capture", lambda *_: True)
    launched = []
    launch = Replay.launch

    def count(replay: Replay) -> None:
        launched.append(replay)
        launch(replay)

    monkeypatch.setattr(Replay, "launch", count)
    test_host_time(benchmark, group, name, monkeypatch)  # captures in the second round of warm-up
    if benchmark.stats is not None:
        assert len(launched) >= ROUNDS
    benchmark.extra_info.update(aim=f"at most {REPLAY_AIMS.get(name, 100)} microseconds")
