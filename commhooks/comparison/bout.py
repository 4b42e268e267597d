"""One contender on one rank: step by step, with what each step costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.comparison import memory
from commhooks.comparison.contender import Contender
from commhooks.comparison.subject import Subject
from commhooks.handle import HookHandle
from commhooks.hook import CommHook
from commhooks.wire import all_reduce_bytes

__all__ = ["FIRST_STEP", "Bout", "Costs", "StepSeconds", "measure_peak"]

FIRST_STEP = 100_000
"""Hooks count steps from here, so that whatever they do in their first steps is over."""


@dataclass(frozen=True)
class StepSeconds:
    """From a barrier."""

    forward: float
    step: float
    """To the return of backward."""


@dataclass(frozen=True)
class Costs:
    """Means over steps, on one rank."""

    wire_bytes: float
    exposed_seconds: float | None
    buckets: int | None


class Bout:
    """A wrapped model; parameters are shared with ``weights``, which nobody changes."""

    def __init__(
        self, contender: Contender, subject: Subject, weights: nn.Module, rank: int
    ) -> None:
        module = subject.make_module()
        _share(module, weights)
        self._subject = subject
        self._rank = rank
        self._batch = subject.make_input(module, rank)
        self._model, self._handle = contender.wrap(module)
        if self._handle is not None:
            _skip_first_steps(self._handle)
            if _changes_parameters(self._handle):
                _unshare(module)
        self._module = module
        self._wire_bytes = 0
        if self._handle is None and isinstance(self._model, nn.parallel.DistributedDataParallel):
            self._wire_bytes = all_reduce_bytes(
                sum(parameter.nbytes for parameter in self._trained()), dist.get_world_size()
            )
        self._before = self._sums()

    def step(self) -> StepSeconds:
        """One step, begun by all ranks together; gradients stay until :meth:`clear`."""
        dist.barrier()
        start = time.perf_counter()
        loss = self._subject.loss(self._model, self._batch, self._rank)
        forward = time.perf_counter() - start
        torch.autograd.backward(loss)
        return StepSeconds(forward, time.perf_counter() - start)

    def clear(self) -> None:
        """Drops the gradients."""
        self._model.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Of all trained parameters, zeros where there is none."""
        return [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for parameter in self._trained()
        ]

    def begin_counting(self) -> None:
        """What :meth:`costs` says is about the steps from here on."""
        self._before = self._sums()

    def costs(self) -> Costs:
        """Since :meth:`begin_counting`."""
        if self._handle is None:
            return Costs(self._wire_bytes, None, None)
        steps, wire_bytes, exposed = (
            now - before for now, before in zip(self._sums(), self._before, strict=True)
        )
        buckets = len(self._handle.stats().buckets)
        return Costs(wire_bytes / steps, exposed / steps, buckets)

    def _sums(self) -> tuple[float, float, float]:
        """Steps, bytes and exposed seconds since the hook was registered."""
        if self._handle is None:
            return 0.0, 0.0, 0.0
        stats = self._handle.stats()
        total = stats.total
        return (
            stats.steps,
            stats.steps * (total.wire_bytes or 0.0),
            stats.steps * (total.exposed_seconds or 0.0),
        )

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]


def measure_peak(make: Callable[[], Bout], steps: int) -> tuple[Bout, int | None]:
    """A new bout, and the most memory that its first steps took beyond what was there before.

    That is gradients, buckets, the hook's state and temporaries; None where it cannot be told.
    """
    try:
        memory.reset_peak()
        before = memory.resident_bytes()
    except OSError:
        before = None
    bout = make()
    for _ in range(steps):
        bout.clear()
        bout.step()
    return bout, None if before is None else memory.peak_bytes() - before


def _share(module: nn.Module, weights: nn.Module) -> None:
    for own, shared in zip(module.parameters(), weights.parameters(), strict=True):
        own.data = shared.data


def _unshare(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _skip_first_steps(handle: HookHandle) -> None:
    handle.load_state_dict({**handle.state_dict(), "step": FIRST_STEP})


def _changes_parameters(handle: HookHandle) -> bool:
    return isinstance(handle.hook, CommHook) and handle.hook.changes_parameters
