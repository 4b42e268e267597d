"""Sees what the engine does with a model: which buckets it makes, when, of what gradients."""

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

__all__ = ["Step", "witness"]

_WARM_UP = 2  # buckets are cut anew after the first step
_TIMED = range(2, 6)  # more than the fewest only while that takes no longer than the seconds below
_SECONDS = 5.0


@dataclass(frozen=True)
class Step:
    """A step without communication; times in seconds."""

    buckets: tuple[GradBucket, ...]
    """With their gradients."""
    launches: tuple[float, ...]
    """From the start of backward until each bucket, packed, was handed to the hook."""
    backward_seconds: float
    forward_seconds: float


def witness(
    model: nn.Module,
    forward: Callable[[nn.Module], Tensor],
    hook: CommHook,
    alone: dist.ProcessGroup,
    *,
    bucket_cap_mb: float | None = None,
) -> Step:
    """Runs some steps in the group ``alone``, of one rank, with buckets as ``hook`` prefers them.

    ``forward`` maps the wrapped model to a loss. The hook has to be prepared, and does not run.
    """
    wrapped = DistributedDataParallel(model, process_group=alone, bucket_cap_mb=bucket_cap_mb)
    adapter = DDPAdapter(wrapped)
    watch = _Watch()
    adapter.install_function(watch)
    adapter.regroup(hook.bucket_key)
    for _ in range(_WARM_UP):
        _step(wrapped, forward, watch)
    steps: list[Step] = []
    end = time.monotonic() + _SECONDS
    while len(steps) < _TIMED.start or (len(steps) < _TIMED.stop - 1 and time.monotonic() < end):
        steps.append(_step(wrapped, forward, watch))
    watch.keeps_gradients = True
    kept = _step(wrapped, forward, watch)
    # The fastest is the one in which the machine did nothing else.
    fastest = min(steps, key=lambda step: step.backward_seconds)
    return replace(
        fastest,
        buckets=kept.buckets,
        forward_seconds=min(step.forward_seconds for step in steps),
    )


def _step(model: nn.Module, forward: Callable[[nn.Module], Tensor], watch: "_Watch") -> Step:
    model.zero_grad(set_to_none=True)
    watch.clear()
    start = time.perf_counter()
    loss = forward(model)
    between = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    end = time.perf_counter()
    launches = tuple(launch - between for launch in watch.launches)
    return Step(tuple(watch.buckets), launches, end - between, between - start)


class _Watch:
    """A torch-style hook that changes nothing."""

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
