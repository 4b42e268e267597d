"""The host time of a hook per bucket, on the thread that runs backward, on one rank."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.runtime.stream_runner import StreamRunner
from reducer import GradBucket

ROUNDS = 300
WARM_UP = 50
AIM = "at most 60 microseconds"


@dataclass
class Plain(commhooks.CommHook):
    """A hook with one collective."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        """Average the bucket."""
        return await comm.all_reduce(bucket.buffer())


POWERSGD = {"start_step": 0, "min_compression_rate": 1.0}
MATRIX = [(100, 100)]
# Two layers of a transformer: four shapes of matrices, with vectors between them.
LAYERS = 2 * [(64,), (192, 64), (192,), (64, 64), (64,), (64,), (256, 64), (256,), (64, 256), (64,)]

SUBJECTS: dict[str, tuple[Callable[[], commhooks.CommHook], list[tuple[int, ...]]]] = {
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
    shapes: list[tuple[int, ...]],
    buffer: Tensor,
    group: dist.ProcessGroup,
) -> tuple[StreamRunner, GradBucket]:
    """Create a runner and a bucket whose flat gradients are ``buffer``."""
    parameters = [nn.Parameter(buffer.new_zeros(shape)) for shape in shapes]
    names = [f"parameter{i}" for i in range(len(parameters))]
    hook.prepare(dict(zip(names, parameters, strict=True)), group)
    bucket = GradBucket(buffer, parameters, names, step=1)
    return StreamRunner(hook, group, buffer.device, token=0), bucket


def measure(
    benchmark: Any, name: str, device: str, group: dist.ProcessGroup, settle: Callable[[], Any]
) -> None:
    """Time passing a bucket until its future is returned; call ``settle`` before rounds."""
    make, shapes = SUBJECTS[name]
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    runner, bucket = runner_and_bucket(make(), shapes, torch.randn(numel, device=device), group)
    runner(bucket).wait()
    seconds: list[float] = []

    def run() -> None:
        start = time.perf_counter()
        runner(bucket)
        seconds.append(time.perf_counter() - start)

    gc.collect()
    benchmark.pedantic(run, setup=settle, rounds=ROUNDS, warmup_rounds=WARM_UP)
    microseconds = statistics.median(seconds[WARM_UP:] or seconds) * 1e6
    benchmark.extra_info.update(microseconds=microseconds, aim=AIM)
