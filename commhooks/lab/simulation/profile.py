"""Profile the engine with a model: which buckets it makes and when."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as TorchBucket
from torch.futures import Future

from commhooks.adapters.dispatch import adapter_of
from commhooks.adapters.wrapper import wrap
from commhooks.cluster import CPU, Device
from commhooks.comm.exchange import completed
from commhooks.costs.step_trace import BucketTrace, StepTrace
from reducer import GradBucket

_WARM_UP = 2  # buckets are rebuilt after the first step
_FEWEST, _MOST, _SECONDS = 2, 5, 5.0  # timed steps; no more than the fewest after the seconds


@dataclass(frozen=True)
class StepProfile:
    """A step without communication."""

    buckets: tuple[GradBucket, ...]
    """All buckets in order, with copies of their gradients."""
    trace: StepTrace
    """The engine's time before and after each bucket, without a hook."""

    def with_hook(self, hook: StepTrace, *, is_native: bool) -> StepTrace:
        """Return the trace of a hook alone with this engine's time around each bucket."""
        buckets = tuple(
            replace(trace, backward_seconds=own.backward_seconds, unpack_seconds=own.unpack_seconds)
            for trace, own in zip(hook.buckets, self.trace.buckets, strict=True)
        )
        return StepTrace(buckets, self.trace.forward_seconds, is_native)


def profile(
    model: nn.Module,
    forward: Callable[[nn.Module], Tensor],
    key_of: Callable[[str], Hashable],
    alone: dist.ProcessGroup,
    *,
    device: Device = CPU,
    **options: Any,
) -> StepProfile:
    """Run a few steps of a model on ``device`` in the group ``alone``, of one rank.

    ``forward`` maps the wrapped model to a loss. Only parameters with equal keys share a bucket.
    ``options`` are those of the wrapper. Raises RuntimeError if a step leaves out a bucket.
    """
    wrapped = wrap(model, process_group=alone, **options)
    adapter = adapter_of(wrapped)
    recorder = _Recorder(model, device)
    adapter.install(recorder)
    adapter.regroup(key_of)
    for _ in range(_WARM_UP):
        _step(wrapped, forward, recorder)
    steps: list[StepTrace] = []
    end = time.monotonic() + _SECONDS
    while len(steps) < _FEWEST or (len(steps) < _MOST and time.monotonic() < end):
        steps.append(_step(wrapped, forward, recorder))
    recorder.kept = []
    _step(wrapped, forward, recorder)
    # In the fastest step the machine was least busy with other work.
    fastest = min(steps, key=lambda step: step.backward_seconds)
    forward_seconds = min(step.forward_seconds for step in steps)
    return StepProfile(tuple(recorder.kept), replace(fastest, forward_seconds=forward_seconds))


def _step(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], recorder: "_Recorder"
) -> StepTrace:
    model.zero_grad(set_to_none=True)
    recorder.launches.clear()
    device = recorder.device
    start = device.mark()
    loss = forward(model)
    between = device.mark()
    loss.backward()  # type: ignore[no-untyped-call]
    end = device.mark()
    device.synchronize()
    if not recorder.launches:
        raise RuntimeError(
            "expected a gradient for each parameter, found some without; pass "
            "find_unused_parameters=True if a step does not use them"
        )
    moments, sizes = zip(*recorder.launches, strict=True)
    unpacking = device.seconds(moments[-1], end) / max(1, sum(sizes))  # per byte
    buckets = tuple(
        BucketTrace(nbytes, device.seconds(before, moment), unpacking * nbytes)
        for nbytes, before, moment in zip(sizes, (between, *moments[:-1]), moments, strict=True)
    )
    return StepTrace(buckets, device.seconds(start, between), is_native=False)


class _Recorder:
    """A torch-style hook that returns each bucket unchanged and notes when it was called."""

    def __init__(self, model: nn.Module, device: Device) -> None:
        self.device = device
        self.launches: list[tuple[Any, int]] = []
        """The mark and the bytes of each bucket of the current step."""
        self.kept: list[GradBucket] | None = None
        """Copies of the buckets, unless None."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def __call__(self, bucket: TorchBucket) -> Future[Tensor]:
        self.launches.append((self.device.mark(), bucket.buffer().nbytes))
        if self.kept is not None:
            self.kept.append(self._copy(bucket))
        return completed(bucket.buffer())

    def _copy(self, bucket: TorchBucket) -> GradBucket:
        parameters, flat = bucket.parameters(), bucket.buffer().clone()
        names = [self._names[id(parameter)] for parameter in parameters]
        return GradBucket(flat, parameters, names, index=bucket.index(), is_last=bucket.is_last())
