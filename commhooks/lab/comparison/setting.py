"""Contenders side by side at one place: over loopback, or over one link."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from commhooks.cluster import Ranks
from commhooks.errors import CommHookError
from commhooks.lab.comparison import remote as ring
from commhooks.lab.comparison.entry import BARE, Contender
from commhooks.lab.comparison.remote import Entry
from commhooks.lab.comparison.result import TrainingPoint
from commhooks.lab.comparison.trial import Costs
from commhooks.lab.models import Subject

__all__ = [
    "ComparisonError",
    "Figures",
    "Progress",
    "enter_all",
    "time_all",
    "train_all",
]

WARM_UP = 2  # steps after the first, in which buckets are cut anew
_EVALUATIONS = 10

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how much of it."""


class ComparisonError(CommHookError):
    """A comparison cannot be made, or one of its contenders failed."""


@dataclass(frozen=True)
class Figures:
    """Of one contender at one place: medians over steps of the slowest rank."""

    step_seconds: float
    step_spread_seconds: float
    exposed_seconds: float
    costs: Costs


def enter_all(
    ranks: Ranks,
    subject: Subject,
    contenders: Sequence[Contender],
    progress: Progress,
    *,
    verify: bool,
) -> dict[str, Entry]:
    """Wraps a model for each contender, the bare one first, and warms it up. The worst rank's."""
    ranks(ring.open_ring, subject)
    entries = {}
    for index, contender in enumerate(contenders):
        progress("preparing", index, len(contenders))
        of_ranks = _told_apart(contender, ranks, ring.enter, contender, WARM_UP)
        errors = [entry.error for entry in of_ranks if entry.error is not None]
        peaks = [entry.peak_bytes for entry in of_ranks if entry.peak_bytes is not None]
        worst = max(errors, key=_nan_last, default=None)
        entries[contender.name] = Entry(worst, max(peaks, default=None))
        if verify and contender == BARE:
            ranks(ring.take_mean)
    return entries


def time_all(
    ranks: Ranks, contenders: Sequence[Contender], steps: int, progress: Progress
) -> dict[str, Figures]:
    """Contenders take turns step by step, so that whatever else the machine does hits all alike."""
    ranks(ring.begin_counting)
    totals: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for index in range(steps):
        progress("measuring", index, steps)
        for contender in contenders:
            of_ranks = _told_apart(contender, ranks, ring.step, contender.name)
            totals[contender.name].append(max(of_ranks))
    return {
        contender.name: Figures(
            step_seconds=statistics.median(totals[contender.name]),
            step_spread_seconds=_spread(totals[contender.name]),
            exposed_seconds=_difference(totals[contender.name], totals[BARE.name]),
            costs=ranks(ring.costs, contender.name)[0],
        )
        for contender in contenders
    }


def train_all(
    ranks: Ranks,
    contenders: Sequence[Contender],
    function: str,
    steps: int,
    progress: Progress,
) -> dict[str, tuple[TrainingPoint, ...]]:
    """One after the other, each from the same start; about ten validations each."""
    stride = max(1, steps // _EVALUATIONS)
    courses = {}
    for index, contender in enumerate(contenders):
        _told_apart(contender, ranks, ring.begin_training, contender, function)
        points = []
        for done in range(1, steps + 1):
            progress(f"training {contender.name}", index * steps + done, len(contenders) * steps)
            validate = done % stride == 0 or done == steps
            point = _told_apart(contender, ranks, ring.train, validate)[0]
            points += [point] if validate else []
        courses[contender.name] = tuple(points)
    return courses


def _told_apart(contender: Contender, ranks: Ranks, function: Any, *arguments: Any) -> list[Any]:
    """Calls; an error says of which contender."""
    try:
        return ranks(function, *arguments)
    except Exception as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        raise ComparisonError(
            f"{contender.name!r} failed: {type(error).__name__}: {error}{notes}"
        ) from error


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _difference(values: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(values, others, strict=True))


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
