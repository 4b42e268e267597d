"""The rank's side of a comparison. Its methods are called one at a time, on all ranks at once.

Note [One model for all entries]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank has one model, and one wrapper around it at a time: two wrappers would both react to the
gradients of the same parameters. So entries do not take turns step by step but in blocks of steps,
and each turn begins with a new wrapper, without the state of earlier ones. When a turn ends, the
wrapper, its buckets and the state of its hook are freed, and the memory is given back to the
system: memory does not grow with the number of hooks, and an entry finds none that an earlier one
has touched. A hook that changes parameters works on them as the others do, and they are restored
afterwards.

Note [Training functions]
~~~~~~~~~~~~~~~~~~~~~~~~~
A training function is a generator function ``train(model, rank, world_size)``. Each ``next()``
runs one training step on the wrapped model and yields a function without arguments, which returns
the loss on validation data, a float. That function is called after some of the steps, on all ranks;
its time does not count. ::

    def train(model, rank, world_size):
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches(rank, world_size):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            yield lambda: validate(model)
"""

import inspect
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.adapters.wrapper import wrap
from commhooks.errors import CommHookError
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.result import TrainingPoint
from commhooks.lab.machine import MemoryPeak, free_memory
from commhooks.lab.models import Workload, load_callable

FIRST_STEP = 100_000
"""Hooks count steps from here, so that all warm-ups are over."""
_WARM_UP = 2
"""Steps of a new wrapper that are not timed: after the first one, buckets are rebuilt."""

_SEED = 20190530

Steps = Iterator[Callable[[], float]]


class StepTimes(NamedTuple):
    """The seconds of a step, and of its backward alone."""

    step: float
    backward: float


@dataclass(frozen=True)
class FirstSteps:
    """Results of the first steps of an entry on one rank."""

    error: float | None
    """The relative L2 error of the first step's gradients against the exact mean. NaN or infinite
    if they are not finite; None for the bare entry."""
    peak_bytes: int | None
    """The peak of memory besides parameters; None if the system does not tell."""
    wire_bytes: float


@dataclass(frozen=True)
class Block:
    """Consecutive timed steps of an entry. Bytes are the mean per step on one rank."""

    times: tuple[StepTimes, ...]
    wire_bytes: float
    is_uniform: bool
    """Whether all steps have sent as many bytes."""


class EntryRun:
    """One run of an entry, with a fresh wrapper around ``module``.

    The module must be the same on all ranks. The hook counts steps from ``first_step``.
    """

    def __init__(
        self, entry: Entry, module: nn.Module, workload: Workload, rank: int, *, first_step: int
    ) -> None:
        self._entry = entry
        self._workload = workload
        self._rank = rank
        self._batch = workload.make_input(module, rank)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._model, self.handle = entry.wrap(module, init_sync=False, **dict(workload.wrapper))
        if self.handle is not None:
            self.handle.load_state_dict({**self.handle.state_dict(), "step": first_step})

    def step(self) -> StepTimes:
        """Run one step, which all ranks begin together. The gradients stay until :meth:`clear`."""
        self._workload.device.barrier()
        return self.step_alone()

    def step_alone(self) -> StepTimes:
        """Run one step without waiting for the others, as only the bare model can."""
        device = self._workload.device
        start = device.mark()
        loss = self._workload.loss(self._model, self._batch, self._rank)
        middle = device.mark()
        torch.autograd.backward(loss)
        end = device.mark()
        device.synchronize()
        return StepTimes(device.seconds(start, end), device.seconds(middle, end))

    def clear(self) -> None:
        self._model.zero_grad(set_to_none=self._workload.set_to_none)

    def close(self) -> None:
        """Free the wrapper, though a variable may still refer to the run."""
        del self._model, self.handle, self._batch

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all trained parameters, with zeros for missing ones."""
        return [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._trained]

    def sent_bytes(self, last: int) -> float:
        """Return the mean per step of the last steps."""
        if self.handle is None:
            gradient_bytes = sum(parameter.nbytes for parameter in self._trained)
            return self._entry.wire_bytes(gradient_bytes, dist.get_world_size())
        return self.handle.stats(last).total.wire_bytes or 0.0


class TrainingError(CommHookError, ValueError):
    """The training function does not follow the protocol."""


def load_training_function(path: str) -> Callable[..., Steps]:
    """Load the function that ``package.module:function`` names.

    Raises ModelError and TrainingError.
    """
    function = load_callable(path)
    if not inspect.isgeneratorfunction(function):
        raise TrainingError(
            f"{path!r}: expected a generator function train(model, rank, world_size) that yields a "
            f"function for the validation loss after each step; found {function!r}"
        )
    return function


class TrainingRun:
    """The training of one entry on one rank, from its first step."""

    def __init__(self, entry: Entry, workload: Workload, function: str, rank: int) -> None:
        self._path, self._entry, self._device = function, entry, workload.device
        module = workload.make_module()
        self._gradient_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        model, self._handle = entry.wrap(module, **dict(workload.wrapper))
        torch.manual_seed(_SEED + 1 + rank)
        self._steps = load_training_function(function)(model, rank, dist.get_world_size())
        self._validate: Callable[[], float] = lambda: math.nan
        self._count = 0

    def step(self) -> float:
        """Run the next training step, which all ranks begin together; return its seconds."""
        self._device.barrier()
        start = self._device.now()
        try:
            self._validate = next(self._steps)
        except StopIteration:
            raise TrainingError(
                f"{self._path!r} ended after {self._count} steps; expected at least as many steps "
                "as were requested, for example with `while True`"
            ) from None
        seconds = self._device.now() - start
        if not callable(self._validate):
            raise TrainingError(
                f"{self._path!r}: expected it to yield a function without arguments that returns "
                f"the validation loss, found {self._validate!r}"
            )
        self._count += 1
        return seconds

    def validate(self) -> TrainingPoint:
        """Return the point after the last step, without seconds. Its loss is the ranks' mean."""
        with torch.no_grad():
            loss = self._device.put(torch.tensor(float(self._validate()), dtype=torch.float64))
        dist.all_reduce(loss)
        ranks = dist.get_world_size()
        sent: float = self._entry.wire_bytes(self._gradient_bytes, ranks)
        if self._handle is not None:
            sent = self._handle.stats().total.wire_bytes or 0.0
        return TrainingPoint(self._count, 0.0, self._count * sent, loss.item() / ranks)


class ComparedModel:
    """The model on this rank, with the same parameters and buffers as on the others."""

    def __init__(self, rank: int, workload: Workload) -> None:
        put = workload.device.put
        for entry in (TORCH, Entry.of("allreduce")):
            # Load here what a first step loads, or the first entry would be charged for the memory.
            model, _ = entry.wrap(put(nn.Linear(1, 1)))
            model(put(torch.ones(1, 1))).sum().backward()
        self.module = workload.make_module()
        wrap(self.module)  # checks the model, and sends that of rank 0 to all ranks
        self._rank = rank
        self._workload = workload
        self._mean: list[Tensor] = []
        """The exact mean over ranks of the gradients of one step."""
        self._run: TrainingRun | None = None

    def verify(self, entry: Entry) -> FirstSteps:
        """Run the first steps of an entry and compare the first gradients with their exact mean.

        The mean is that of the bare model's gradients.
        """
        if entry != BARE and not self._mean:
            with self.entry_run(BARE, FIRST_STEP) as (run, _):
                run.step()
                self._mean = list(map(_mean, run.gradients()))
        with self.entry_run(entry, FIRST_STEP) as (run, peak):
            run.step()
            error = None if entry == BARE else _error(run.gradients(), self._mean)
            peak.begin()  # again, because computing the error does not count
            for _ in range(_WARM_UP):
                run.clear()
                run.step()
            return FirstSteps(error, peak.nbytes(), run.sent_bytes(1 + _WARM_UP))

    def time_block(self, entry: Entry, done: int, steps: int) -> Block:
        """Time some steps of an entry, after a warm-up. The hook has counted ``done`` steps."""
        self._mean, times, sent = [], list[StepTimes](), list[float]()
        with self.entry_run(entry, FIRST_STEP + done - _WARM_UP) as (run, _):
            for _ in range(_WARM_UP + steps):
                times.append(run.step())
                sent.append(run.sent_bytes(1))
                run.clear()
            is_uniform = len({*sent[_WARM_UP:]}) == 1
            return Block(tuple(times[_WARM_UP:]), run.sent_bytes(steps), is_uniform)

    def time_alone(self, steps: int) -> float | None:
        """Return the median step of the bare model while no other rank computes, on rank 0."""
        if self._rank > 0:
            return None
        with self.entry_run(BARE, FIRST_STEP) as (run, _):
            times = []
            for _ in range(_WARM_UP + steps):
                times.append(run.step_alone().step)
                run.clear()
        return statistics.median(times[_WARM_UP:])

    def begin_training(self, entry: Entry, function: str) -> None:
        """Train from the first step, with parameters of its own; free an earlier training."""
        self._mean = []
        self._run = None
        free_memory()
        self._run = TrainingRun(entry, self._workload, function, self._rank)

    def train(self, validate: bool) -> tuple[float, TrainingPoint | None]:
        """Run one training step; return its seconds, and the loss after it if ``validate``."""
        assert self._run is not None
        seconds = self._run.step()
        return seconds, self._run.validate() if validate else None

    @contextmanager
    def entry_run(self, entry: Entry, first_step: int) -> Iterator[tuple[EntryRun, MemoryPeak]]:
        """Run an entry: Note [One model for all entries]."""
        parameters = list(self.module.parameters()) if entry.changes_parameters else []
        before = [parameter.detach().clone() for parameter in parameters]
        peak = MemoryPeak(self._workload.device)
        run = EntryRun(entry, self.module, self._workload, self._rank, first_step=first_step)
        yield run, peak
        run.close()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.detach().copy_(value)
        self.module.zero_grad(set_to_none=True)
        free_memory()


def _error(gradients: list[Tensor], mean: list[Tensor]) -> float:
    """Return the distance to the mean, relative to its norm."""
    error = _norm(found - exact for found, exact in zip(gradients, mean, strict=True))
    norm = _norm(mean)
    return error / norm if norm else math.nan


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(each.to(_wide(each.dtype)).norm().item() for each in tensors))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float64)


def _mean(gradient: Tensor) -> Tensor:
    exact = gradient.to(_wide(gradient.dtype), copy=True)
    dist.all_reduce(exact)
    return (exact / dist.get_world_size()).to(gradient.dtype)
