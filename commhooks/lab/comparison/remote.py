"""What a rank's process does in a comparison; called from the parent, one function at a time.

All bouts of a place stay in the ring, so that they can take turns step by step.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.lab.comparison.entry import BARE, TORCH, Contender
from commhooks.lab.comparison.memory import Peak
from commhooks.lab.comparison.result import TrainingPoint
from commhooks.lab.comparison.training import TrainingRun
from commhooks.lab.comparison.trial import Bout, Costs
from commhooks.lab.models import Subject

__all__ = [
    "Entry",
    "begin_counting",
    "begin_training",
    "close_ring",
    "costs",
    "enter",
    "open_ring",
    "step",
    "take_mean",
    "train",
]


@dataclass(frozen=True)
class Entry:
    """What the first steps of a bout have shown, on one rank."""

    error: float | None
    """Of the first step's gradients against the exact mean, relative, in L2 norm. NaN or infinite
    where something is not finite; None for the bare bout, and if not asked for."""
    peak_bytes: int | None
    """The most memory that was taken, besides parameters; None where that cannot be told."""


@dataclass
class _Ring:
    subject: Subject
    weights: nn.Module
    """Whose parameters all bouts share, but those that change them."""
    bouts: dict[str, Bout] = field(default_factory=dict)
    mean: list[Tensor] = field(default_factory=list)
    """The exact mean over ranks of the gradients of one step."""
    run: TrainingRun | None = None


_rings: list[_Ring] = []


def open_ring(rank: int, subject: Subject) -> None:  # noqa: ARG001
    """To be called first."""
    for contender in (TORCH, Contender("plain", {"name": "allreduce"})):
        # What is loaded in a first step is no memory of whoever happens to be the first.
        model, _ = contender.wrap(nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()
    _rings[:] = [_Ring(subject, subject.make_module())]


def enter(rank: int, contender: Contender, warm_up: int) -> Entry:
    """A new bout, and its first steps; the error is known if :func:`take_mean` has been called."""
    ring = _rings[0]
    module = ring.subject.make_module()
    if not contender.changes_parameters:
        _share(module, ring.weights)
    peak = Peak()
    bout = ring.bouts[contender.name] = Bout(contender, module, ring.subject, rank)
    bout.step()
    error = _error(bout.gradients(), ring.mean) if ring.mean else None
    peak.begin()  # anew: what it took to find the error does not count
    for _ in range(warm_up):
        bout.clear()
        bout.step()
    return Entry(error, peak.nbytes())


def take_mean(rank: int) -> None:  # noqa: ARG001
    """Keeps the exact mean over ranks of the gradients of the bare bout, which has to be there."""
    ring = _rings[0]
    ring.mean = [_mean(gradient) for gradient in ring.bouts[BARE.name].gradients()]


def step(rank: int, name: str) -> float:  # noqa: ARG001
    """Seconds of one step of a bout; its gradients are dropped afterwards."""
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


def close_ring(rank: int) -> None:  # noqa: ARG001
    """Lets go of everything."""
    _rings.clear()


def begin_training(rank: int, contender: Contender, function: str) -> None:
    """From the first step, with parameters of its own. The ring is cleared before."""
    ring = _rings[0]
    ring.bouts.clear()
    ring.run = None
    ring.run = TrainingRun(contender, ring.subject, function, rank)


def train(rank: int, validate: bool) -> TrainingPoint | None:  # noqa: ARG001
    """One training step, and the loss after it if asked for."""
    run = _rings[0].run
    assert run is not None
    run.step()
    return run.validate() if validate else None


def _error(gradients: list[Tensor], mean: list[Tensor]) -> float:
    """The distance, relative to the mean's length."""
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
