"""What a rank's process does in a comparison; called from the parent, one function at a time.

All bouts of a place stay in the ring, so that they can take turns step by step.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from commhooks.comparison.bout import Bout, Costs, StepSeconds, measure_peak
from commhooks.comparison.contender import Contender
from commhooks.comparison.subject import Subject
from commhooks.comparison.training import TrainingRun

__all__ = [
    "begin_counting",
    "begin_training",
    "costs",
    "enter",
    "measure_error",
    "open_ring",
    "step",
    "take_mean",
    "train",
]


@dataclass
class _Ring:
    subject: Subject
    weights: nn.Module
    bouts: dict[str, Bout] = field(default_factory=dict)
    mean: list[Tensor] = field(default_factory=list)
    """The exact mean over ranks of the gradients of one step."""
    run: TrainingRun | None = None


_rings: list[_Ring] = []


def open_ring(rank: int, subject: Subject) -> None:  # noqa: ARG001
    """To be called first."""
    _rings[:] = [_Ring(subject, subject.make_module())]


def enter(rank: int, contender: Contender, warm_up: int) -> int | None:
    """A new bout, and its first steps; returns the peak of its memory in bytes."""
    ring = _rings[0]
    make = partial(Bout, contender, ring.subject, ring.weights, rank)
    ring.bouts[contender.name], peak = measure_peak(make, warm_up)
    return peak


def take_mean(rank: int, name: str) -> None:  # noqa: ARG001
    """Keeps the exact mean over ranks of the gradients of a bout's last step."""
    ring = _rings[0]
    ring.mean = [_mean(gradient) for gradient in ring.bouts[name].gradients()]


def measure_error(rank: int, name: str) -> float:  # noqa: ARG001
    """The error of the gradients of a bout's last step against that mean, relative, in L2 norm.

    NaN or infinite where something is not finite. A hook without consensus has an error of its own
    on each rank.
    """
    ring = _rings[0]
    gradients = ring.bouts[name].gradients()
    error = sum(
        (found - exact).double().square().sum().item()
        for found, exact in zip(gradients, ring.mean, strict=True)
    )
    norm = sum(exact.double().square().sum().item() for exact in ring.mean)
    return math.sqrt(error / norm) if norm else math.nan


def step(rank: int, name: str) -> StepSeconds:  # noqa: ARG001
    """One step of a bout; its gradients are dropped afterwards."""
    bout = _rings[0].bouts[name]
    seconds = bout.step()
    bout.clear()
    return seconds


def begin_counting(rank: int) -> None:  # noqa: ARG001
    """For :func:`costs` of all bouts. Gradients and their mean are dropped."""
    ring = _rings[0]
    ring.mean = []
    for bout in ring.bouts.values():
        bout.clear()
        bout.begin_counting()


def costs(rank: int, name: str) -> Costs:  # noqa: ARG001
    """Of a bout, since :func:`begin_counting`."""
    return _rings[0].bouts[name].costs()


def begin_training(rank: int, contender: Contender, function: str) -> None:
    """From the first step, with parameters of its own. The ring is cleared before."""
    ring = _rings[0]
    ring.bouts.clear()
    ring.run = None
    ring.run = TrainingRun(contender, ring.subject, function, rank)


def train(rank: int, steps: int) -> tuple[float, float, float]:  # noqa: ARG001
    """Goes on for ``steps``; see :meth:`TrainingRun.go_on`."""
    run = _rings[0].run
    assert run is not None
    return run.go_on(steps)


def _mean(gradient: Tensor) -> Tensor:
    exact = gradient.double()
    dist.all_reduce(exact)
    return (exact / dist.get_world_size()).to(gradient.dtype)
