"""The remote side of a comparison: what each rank's process does.

The parent calls these functions one at a time, on all ranks at once. All trials of a setting stay
in memory, so that they can take turns step by step.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.memory import Peak
from commhooks.lab.comparison.result import TrainingPoint
from commhooks.lab.comparison.training import TrainingRun
from commhooks.lab.comparison.trial import Trial, TrialCosts
from commhooks.lab.models import Workload

__all__ = [
    "FirstSteps",
    "begin_counting",
    "begin_training",
    "begin_trial",
    "clear",
    "costs",
    "keep_mean",
    "prepare",
    "step",
    "train",
]


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a trial show on one rank."""

    error: float | None
    """The relative L2 error of the first step's gradients against the exact mean. NaN or infinite
    if they are not finite; None for the bare entry, or if the mean is not known."""
    peak_bytes: int | None
    """The peak of memory besides parameters; None if the system does not tell."""


@dataclass
class _RemoteSide:
    workload: Workload
    weights: nn.Module
    """Its parameters are shared by all trials whose entry does not change parameters."""
    trials: dict[str, Trial] = field(default_factory=dict)
    mean: list[Tensor] = field(default_factory=list)
    """The exact mean over ranks of the gradients of one step."""
    run: TrainingRun | None = None


_sides: list[_RemoteSide] = []  # at most one


def prepare(rank: int, workload: Workload) -> None:  # noqa: ARG001
    """Prepare this rank; the parent calls this first."""
    for entry in (TORCH, Entry("plain", {"name": "allreduce"})):
        # Load here what a first step loads, or the first entry would be charged for the memory.
        model, _ = entry.wrap(nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()
    _sides[:] = [_RemoteSide(workload, workload.make_module())]


def begin_trial(rank: int, entry: Entry, warm_up: int) -> FirstSteps:
    """Start a trial and run its first steps; measure the error if :func:`keep_mean` was called."""
    side = _sides[0]
    module = side.workload.make_module()
    if not entry.changes_parameters:
        _share(module, side.weights)
    peak = Peak()
    trial = side.trials[entry.name] = Trial(entry, module, side.workload, rank)
    trial.step()
    error = _error(trial.gradients(), side.mean) if side.mean else None
    peak.begin()  # again, because computing the error does not count
    for _ in range(warm_up):
        trial.clear()
        trial.step()
    return FirstSteps(error, peak.nbytes())


def keep_mean(rank: int) -> None:  # noqa: ARG001
    """Keep the exact mean over ranks of the gradients of the bare trial, which must exist."""
    side = _sides[0]
    side.mean = [_mean(gradient) for gradient in side.trials[BARE.name].gradients()]


def begin_counting(rank: int) -> None:  # noqa: ARG001
    """Let :func:`costs` of all trials count from here on. Drops gradients and their mean."""
    side = _sides[0]
    side.mean = []
    for trial in side.trials.values():
        trial.clear()
        trial.begin_counting()


def step(rank: int, name: str) -> float:  # noqa: ARG001
    """Run one step of a trial, drop its gradients and return the seconds of the step."""
    trial = _sides[0].trials[name]
    seconds = trial.step()
    trial.clear()
    return seconds


def costs(rank: int, name: str) -> TrialCosts:  # noqa: ARG001
    """Return the costs of a trial since :func:`begin_counting`."""
    return _sides[0].trials[name].costs()


def clear(rank: int) -> None:  # noqa: ARG001
    """Free everything."""
    _sides.clear()


def begin_training(rank: int, entry: Entry, function: str) -> None:
    """Drop all trials and start training from the first step, with parameters of its own."""
    side = _sides[0]
    side.trials.clear()
    side.run = None
    side.run = TrainingRun(entry, side.workload, function, rank)


def train(rank: int, validate: bool) -> TrainingPoint | None:  # noqa: ARG001
    """Run one training step; return the loss after it if ``validate``."""
    run = _sides[0].run
    assert run is not None
    run.step()
    return run.validate() if validate else None


def _error(gradients: list[Tensor], mean: list[Tensor]) -> float:
    """Return the distance to the mean, relative to its norm."""
    error = sum(
        (found - exact).double().square().sum().item()
        for found, exact in zip(gradients, mean, strict=True)
    )
    norm = sum(exact.double().square().sum().item() for exact in mean)
    return math.sqrt(error / norm) if norm else math.nan


def _mean(gradient: Tensor) -> Tensor:
    exact = gradient.double()
    dist.all_reduce(exact)
    return (exact / dist.get_world_size()).to(gradient.dtype)


def _share(module: nn.Module, weights: nn.Module) -> None:
    for own, shared in zip(module.parameters(), weights.parameters(), strict=True):
        own.data = shared.data
