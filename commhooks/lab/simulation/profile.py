"""Profiles the engine with a model: which buckets it makes and when."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from commhooks.adapters.ddp import DDPAdapter
from commhooks.hook.base import CommHook
from commhooks.hook.derived_bucket import bucket_with
from reducer import DistributedDataParallel, GradBucket

__all__ = ["StepProfile", "profile"]

_WARM_UP = 2  # buckets are rebuilt after the first step
_FEWEST, _MOST, _SECONDS = 2, 5, 5.0  # timed steps; no more than the fewest after the seconds


@dataclass(frozen=True)
class StepProfile:
    """A step without communication; times in seconds."""

    buckets: tuple[GradBucket, ...]
    """All buckets in order, with copies of their gradients."""
    launches: tuple[float, ...]
    """For each bucket, the time from the start of backward until it was passed to the hook."""
    backward_seconds: float
    forward_seconds: float


def profile(
    model: nn.Module,
    forward: Callable[[nn.Module], Tensor],
    hook: CommHook,
    alone: dist.ProcessGroup,
    *,
    bucket_cap_mb: float | None = None,
) -> StepProfile:
    """Run a few steps in the group ``alone``, of one rank, with the buckets that ``hook`` wants.

    ``forward`` maps the wrapped model to a loss. The hook must be prepared; it does not run.
    """
    wrapped = DistributedDataParallel(model, process_group=alone, bucket_cap_mb=bucket_cap_mb)
    adapter = DDPAdapter(wrapped)
    recorder = _Recorder()
    adapter.install_function(recorder)
    adapter.regroup(hook.bucket_key)
    for _ in range(_WARM_UP):
        _step(wrapped, forward, recorder)
    steps: list[StepProfile] = []
    end = time.monotonic() + _SECONDS
    while len(steps) < _FEWEST or (len(steps) < _MOST and time.monotonic() < end):
        steps.append(_step(wrapped, forward, recorder))
    recorder.keeps_gradients = True
    kept = _step(wrapped, forward, recorder)
    # In the fastest step the machine was least busy with other work.
    fastest = min(steps, key=lambda step: step.backward_seconds)
    return replace(
        fastest,
        buckets=kept.buckets,
        forward_seconds=min(step.forward_seconds for step in steps),
    )


def _step(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], recorder: "_Recorder"
) -> StepProfile:
    model.zero_grad(set_to_none=True)
    recorder.clear()
    start = time.perf_counter()
    loss = forward(model)
    between = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    end = time.perf_counter()
    launches = tuple(launch - between for launch in recorder.launches)
    return StepProfile(tuple(recorder.buckets), launches, end - between, between - start)


class _Recorder:
    """A torch-style hook that returns each bucket unchanged and notes when it was called."""

    def __init__(self) -> None:
        self.keeps_gradients = False
        self.clear()

    def clear(self) -> None:
        self.launches: list[float] = []
        self.buckets: list[GradBucket] = []

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        self.launches.append(time.perf_counter())
        if self.keeps_gradients:
            self.buckets.append(bucket_with(bucket, bucket.buffer().clone()))
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future
