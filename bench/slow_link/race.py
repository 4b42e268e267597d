"""One hook's training over the link."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.slow_link.record import Course
from commhooks.cluster import Ranks
from commhooks.cluster.links import shaped_link
from commhooks.hook.spec import hook_spec
from commhooks.lab.comparison import TrainingPoint, remote
from commhooks.lab.comparison.entry import BARE, Entry
from commhooks.lab.models import Workload

__all__ = ["MODEL", "Limits", "Setting", "race"]

MODEL = "bench.slow_link.training:make_gpt"
TRAINING = "bench.slow_link.training:train"
STRIDE = 10  # steps between validations
BARE_STEPS = 8


@dataclass(frozen=True)
class Setting:
    """Where trainings run."""

    ranks: int
    bits_per_second: float
    """Of the link of each rank."""


@dataclass(frozen=True)
class Limits:
    """Training ends after ``steps``, after ``seconds``, or at the validation loss ``loss``."""

    steps: int
    seconds: float = math.inf
    loss: float = -math.inf

    def end(self, point: TrainingPoint) -> bool:
        """Whether training ends at this point."""
        return (
            point.step >= self.steps
            or point.seconds >= self.seconds
            or point.validation_loss <= self.loss
        )


def race(
    hook: str, setting: Setting, limits: Limits, report: Callable[[TrainingPoint], None]
) -> Course:
    """Train with one hook from the first step, in new processes.

    Needs root, see :mod:`commhooks.cluster.links`.
    """
    spec = hook_spec(hook)
    link = shaped_link(setting.ranks, setting.bits_per_second)
    with link as hosts, Ranks(setting.ranks, hosts) as ranks:
        ranks(remote.prepare, Workload(MODEL))
        load, bare_seconds = os.getloadavg()[0], _bare_step_seconds(ranks)
        points = _train(ranks, Entry(spec.text, spec.config), limits, report)
        return Course(
            hook,
            points,
            bare_step_seconds=(bare_seconds, _bare_step_seconds(ranks)),
            load=(load, os.getloadavg()[0]),
        )


def _train(
    ranks: Ranks, entry: Entry, limits: Limits, report: Callable[[TrainingPoint], None]
) -> list[TrainingPoint]:
    ranks(remote.begin_training, entry, TRAINING)
    points: list[TrainingPoint] = []
    while not points or not limits.end(points[-1]):
        for _ in range(STRIDE - 1):
            ranks(remote.train, False)
        points.append(ranks(remote.train, True)[0])
        report(points[-1])
    return points


def _bare_step_seconds(ranks: Ranks) -> float:
    """Return the median of a few training steps without communication."""
    ranks(remote.begin_training, BARE, TRAINING)
    seconds = []
    for _ in range(1 + BARE_STEPS):
        start = time.perf_counter()
        ranks(remote.train, False)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
