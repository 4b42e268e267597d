"""One entry on one rank: its steps and what they cost."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.lab.comparison.entry import Entry
from commhooks.lab.models import Workload

__all__ = ["FIRST_STEP", "StepTimes", "Trial", "TrialCosts"]

FIRST_STEP = 100_000
"""Hooks count steps from here, so that all warm-ups are over."""


@dataclass(frozen=True)
class TrialCosts:
    """Means over steps on one rank."""

    wire_bytes: float
    exposed_seconds: float | None


class StepTimes(NamedTuple):
    """The seconds of a step, and of its backward alone."""

    step: float
    backward: float

    @classmethod
    def slowest(cls, by_rank: Iterable["StepTimes"]) -> "StepTimes":
        """Return the longest times of all ranks."""
        return cls(*map(max, zip(*by_rank, strict=True)))


class Trial:
    """An entry's wrapper around ``module``, and its steps.

    The module must be the same on all ranks. The hook counts steps from ``first_step``.
    """

    def __init__(
        self, entry: Entry, module: nn.Module, workload: Workload, rank: int, *, first_step: int
    ) -> None:
        self._entry = entry
        self._module = module
        self._workload = workload
        self._rank = rank
        self._batch = workload.make_input(module, rank)
        self._model, self._handle = entry.wrap(module, init_sync=False, **dict(workload.wrapper))
        if self._handle is not None:
            self._handle.load_state_dict({**self._handle.state_dict(), "step": first_step})
        self._before = self._sums()

    def step(self) -> StepTimes:
        """Run one step, which all ranks begin together. The gradients stay until :meth:`clear`."""
        dist.barrier()
        start = time.perf_counter()
        loss = self._workload.loss(self._model, self._batch, self._rank)
        middle = time.perf_counter()
        torch.autograd.backward(loss)
        end = time.perf_counter()
        return StepTimes(end - start, end - middle)

    def clear(self) -> None:
        """Clear the gradients."""
        self._model.zero_grad(set_to_none=self._workload.set_to_none)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all trained parameters, with zeros for missing ones."""
        return [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for parameter in self._trained()
        ]

    def begin_counting(self) -> None:
        """Let :meth:`costs` count from here on."""
        self._before = self._sums()

    def costs(self) -> TrialCosts:
        """Return the costs of the steps since :meth:`begin_counting`."""
        if self._handle is None:
            gradient_bytes = sum(parameter.nbytes for parameter in self._trained())
            return TrialCosts(self._entry.wire_bytes(gradient_bytes, dist.get_world_size()), None)
        steps, wire_bytes, exposed = (
            now - before for now, before in zip(self._sums(), self._before, strict=True)
        )
        return TrialCosts(wire_bytes / steps, exposed / steps)

    def _sums(self) -> tuple[float, float, float]:
        """Return steps, bytes and exposed seconds since the hook was registered."""
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
