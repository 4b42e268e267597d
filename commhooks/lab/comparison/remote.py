"""The remote side of a comparison: what each rank does.

The functions are called one at a time, on all ranks at once.

Note [One model for all entries]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank has one model, and one wrapper around it at a time: two wrappers would both react to the
gradients of the same parameters. So entries do not take turns step by step but in blocks of steps,
see plan.py, and each block begins with a new wrapper, without the state of earlier blocks. When a
block ends, the wrapper, its buckets and the state of its hook are freed, and the memory is given
back to the system: memory does not grow with the number of hooks, and an entry finds none that an
earlier one has touched. A hook that changes parameters works on them as the others do, and they are
restored afterwards.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.adapters.wrapper import wrap
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.memory import Peak, give_back
from commhooks.lab.comparison.plan import VERIFIED_STEPS, WARM_UP
from commhooks.lab.comparison.result import TrainingPoint
from commhooks.lab.comparison.training import TrainingRun
from commhooks.lab.comparison.trial import FIRST_STEP, StepTimes, Trial, TrialCosts
from commhooks.lab.models import Workload

__all__ = [
    "Block",
    "FirstSteps",
    "begin_training",
    "clear",
    "prepare",
    "time_block",
    "train",
    "verify",
]

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of an entry show on one rank."""

    error: float | None
    """The relative L2 error of the first step's gradients against the exact mean. NaN or infinite
    if they are not finite; None for the bare entry."""
    peak_bytes: int | None
    """The peak of memory besides parameters; None if the system does not tell."""
    wire_bytes: float


@dataclass(frozen=True)
class Block:
    """Consecutive timed steps of an entry."""

    times: tuple[StepTimes, ...]
    costs: TrialCosts


@dataclass
class _RemoteSide:
    workload: Workload
    module: nn.Module
    mean: list[Tensor] = field(default_factory=list)
    """The exact mean over ranks of the gradients of one step."""
    run: TrainingRun | None = None


_sides: list[_RemoteSide] = []  # at most one


def prepare(rank: int, workload: Workload) -> None:  # noqa: ARG001
    """Prepare this rank: make the model, with the same parameters and buffers on all ranks."""
    for entry in (TORCH, Entry("plain", {"name": "allreduce"})):
        # Load here what a first step loads, or the first entry would be charged for the memory.
        model, _ = entry.wrap(nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()
    module = workload.make_module()
    wrap(module)  # checks the model, and sends that of rank 0 to all ranks
    _sides[:] = [_RemoteSide(workload, module)]


def verify(rank: int, entry: Entry) -> FirstSteps:
    """Run the first steps of an entry and compare the first gradients with their exact mean.

    The mean is that of the bare model's gradients.
    """
    side = _sides[0]
    if entry != BARE and not side.mean:
        side.mean = _take_turn(side, BARE, rank, FIRST_STEP, _mean_of_step)

    def work(trial: Trial, peak: Peak) -> FirstSteps:
        trial.step()
        error = None if entry == BARE else _error(trial.gradients(), side.mean)
        peak.begin()  # again, because computing the error does not count
        for _ in range(VERIFIED_STEPS - 1):
            trial.clear()
            trial.step()
        return FirstSteps(error, peak.nbytes(), trial.costs().wire_bytes)

    return _take_turn(side, entry, rank, FIRST_STEP, work)


def time_block(rank: int, entry: Entry, done: int, steps: int) -> Block:
    """Time some steps of an entry, after a warm-up. The hook has counted ``done`` steps so far."""
    side = _sides[0]
    side.mean = []

    def work(trial: Trial, _peak: Peak) -> Block:
        times = []
        for index in range(WARM_UP + steps):
            if index == WARM_UP:
                trial.begin_counting()
            times.append(trial.step())
            trial.clear()
        return Block(tuple(times[WARM_UP:]), trial.costs())

    return _take_turn(side, entry, rank, FIRST_STEP + done - WARM_UP, work)


def clear(rank: int) -> None:  # noqa: ARG001
    """Free everything."""
    _sides.clear()
    give_back()


def begin_training(rank: int, entry: Entry, function: str) -> None:
    """Start training from the first step, with parameters of its own; free an earlier training."""
    side = _sides[0]
    side.mean = []
    side.run = None
    give_back()
    side.run = TrainingRun(entry, side.workload, function, rank)


def train(rank: int, validate: bool) -> TrainingPoint | None:  # noqa: ARG001
    """Run one training step; return the loss after it if ``validate``."""
    run = _sides[0].run
    assert run is not None
    run.step()
    return run.validate() if validate else None


def _take_turn(
    side: _RemoteSide,
    entry: Entry,
    rank: int,
    first_step: int,
    work: Callable[[Trial, Peak], _Result],
) -> _Result:
    """Do the work with a new trial of the entry, see Note [One model for all entries]."""
    parameters = list(side.module.parameters()) if entry.changes_parameters else []
    before = [parameter.detach().clone() for parameter in parameters]
    peak = Peak()
    result = work(Trial(entry, side.module, side.workload, rank, first_step=first_step), peak)
    for parameter, value in zip(parameters, before, strict=True):
        parameter.detach().copy_(value)
    side.module.zero_grad(set_to_none=True)
    give_back()
    return result


def _error(gradients: list[Tensor], mean: list[Tensor]) -> float:
    """Return the distance to the mean, relative to its norm."""
    error = sum(
        (found - exact).double().square().sum().item()
        for found, exact in zip(gradients, mean, strict=True)
    )
    norm = sum(exact.double().square().sum().item() for exact in mean)
    return math.sqrt(error / norm) if norm else math.nan


def _mean_of_step(trial: Trial, _peak: Peak) -> list[Tensor]:
    trial.step()
    return [_mean(gradient) for gradient in trial.gradients()]


def _mean(gradient: Tensor) -> Tensor:
    exact = gradient.double()
    dist.all_reduce(exact)
    return (exact / dist.get_world_size()).to(gradient.dtype)
