"""Entries side by side in one setting: over loopback, or over one link."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from commhooks.cluster import Ranks
from commhooks.lab.comparison import remote
from commhooks.lab.comparison.entry import BARE, Entry
from commhooks.lab.comparison.remote import FirstSteps
from commhooks.lab.comparison.result import ComparisonError, TrainingPoint
from commhooks.lab.comparison.trial import TrialCosts
from commhooks.lab.models import Workload

__all__ = ["Figures", "ProgressCallback", "Setting"]

_WARM_UP = 2  # steps after the first one, in which buckets are rebuilt
_VALIDATIONS = 10

ProgressCallback = Callable[[str, int, int], None]
"""Called with a description of the current work, how much of it is done, and the total."""


@dataclass(frozen=True)
class Figures:
    """The measurements of one entry in one setting: medians over steps of the slowest rank."""

    step_seconds: float
    step_spread_seconds: float
    exposed_seconds: float
    costs: TrialCosts


@dataclass(frozen=True)
class Setting:
    """``ranks`` that are connected by loopback or by a link, and the entries to compare there."""

    ranks: Ranks
    name: str
    entries: Sequence[Entry]
    progress: ProgressCallback

    def prepare(self, workload: Workload, *, verify: bool) -> dict[str, FirstSteps]:
        """Start a trial of each entry and warm it up. Returns the figures of the worst rank.

        The bare entry must be the first. With ``verify`` the errors of the others are measured.
        """
        self.ranks(remote.prepare, workload)
        found = {}
        for index, entry in enumerate(self.entries):
            self._tell("preparing", index, len(self.entries))
            by_rank = self._call(entry, remote.begin_trial, entry, _WARM_UP)
            errors = [first.error for first in by_rank if first.error is not None]
            peaks = [first.peak_bytes for first in by_rank if first.peak_bytes is not None]
            worst = max(errors, key=_nan_last, default=None)
            found[entry.name] = FirstSteps(worst, max(peaks, default=None))
            if verify and entry == BARE:
                self.ranks(remote.keep_mean)
        return found

    def time(self, steps: int) -> dict[str, Figures]:
        """Time all entries, which take turns step by step so that other load affects all alike."""
        self.ranks(remote.begin_counting)
        seconds: dict[str, list[float]] = {entry.name: [] for entry in self.entries}
        for index in range(steps):
            self._tell("measuring", index, steps)
            for entry in self.entries:
                seconds[entry.name].append(max(self._call(entry, remote.step, entry.name)))
        return {
            name: Figures(
                step_seconds=statistics.median(found),
                step_spread_seconds=_spread(found),
                exposed_seconds=_difference(found, seconds[BARE.name]),
                costs=self.ranks(remote.costs, name)[0],
            )
            for name, found in seconds.items()
        }

    def train(self, function: str, steps: int) -> dict[str, tuple[TrainingPoint, ...]]:
        """Train with all entries but the bare one, each from the same start.

        Each training is validated about ten times.
        """
        entries = [entry for entry in self.entries if entry != BARE]
        stride = max(1, steps // _VALIDATIONS)
        training = {}
        for index, entry in enumerate(entries):
            self._call(entry, remote.begin_training, entry, function)
            points = []
            for done in range(1, steps + 1):
                self._tell(f"training {entry.name}", index * steps + done, len(entries) * steps)
                validate = done % stride == 0 or done == steps
                point = self._call(entry, remote.train, validate)[0]
                points += [point] if validate else []
            training[entry.name] = tuple(points)
        return training

    def _tell(self, what: str, done: int, total: int) -> None:
        self.progress(f"{self.name}: {what}", done, total)

    def _call(self, entry: Entry, function: Any, *arguments: Any) -> list[Any]:
        """Call a function on all ranks; errors name the entry."""
        try:
            return self.ranks(function, *arguments)
        except Exception as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            raise ComparisonError(
                f"{entry.name!r} failed: {type(error).__name__}: {error}{notes}"
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
