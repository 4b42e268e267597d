"""What all ranks know of the errors and the work of each hook, group by group."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from commhooks.algorithms.adaptive.fit import Cost, Point, fit
from commhooks.algorithms.adaptive.groups import Layout, ParameterGroup
from commhooks.algorithms.adaptive.report import Stage, TrialRecord

__all__ = ["Knowledge"]

_KEPT = 3
"""Trials or checks of the same hook and group; their median counts."""


@dataclass
class _Known:
    """What is known of a hook on a group, the newest last."""

    names: tuple[str, ...]
    trials: deque[TrialRecord] = field(default_factory=lambda: deque(maxlen=_KEPT))
    checks: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Errors of the hook when it was in use, which trials without a residual underestimate."""

    @property
    def error(self) -> float:
        return median(self.checks or [trial.error for trial in self.trials])


class Knowledge:
    """The results of trials, by the names of parameters, so that it outlives other buckets."""

    def __init__(self, hooks: int) -> None:
        self._of_hooks: list[list[_Known]] = [[] for _ in range(hooks)]
        self._runs: dict[int, deque[Point]] = {}
        """Of hooks in use, on buckets."""

    def add(self, group: ParameterGroup, hook: int, trial: TrialRecord) -> None:
        """Add the result of a trial. It replaces those of other groups with these parameters."""
        self._own(group, hook).trials.append(trial)

    def add_check(self, group: ParameterGroup, hook: int, error: float) -> None:
        """Add the error that a hook in use had on a group. Errors of its trials no longer count."""
        self._own(group, hook).checks.append(error)

    def _own(self, group: ParameterGroup, hook: int) -> _Known:
        known = self._of_hooks[hook]
        own = next((each for each in known if each.names == group.names), None)
        if own is None:
            names = set(group.names)
            known[:] = [each for each in known if names.isdisjoint(each.names)]
            own = _Known(group.names)
            known.append(own)
        return own

    def is_measured(self, group: ParameterGroup, hook: int) -> bool:
        """Return whether there was a trial or a check of this hook on this group."""
        return any(each.names == group.names for each in self._of_hooks[hook])

    def is_known(self, hook: int) -> bool:
        """Return whether there was a trial of this hook on any group."""
        return bool(self._of_hooks[hook])

    def error(self, group: ParameterGroup, hook: int) -> float:
        """Return the relative error of a hook on a group; NaN if the hook was never tried.

        Until it is measured, that of other groups with some of its parameters, or else the mean of
        all other groups. Until the hook was in use on this group, at least what it has lost on
        others.
        """
        known, near = self._of_hooks[hook], self._near(group, hook)
        if not near:
            return math.nan
        error = fmean(each.error for each in near)
        if any(each.checks for each in near):
            return error
        in_use = [each.error for each in known if each.checks]
        return max(error, fmean(in_use)) if in_use else error

    def trial(self, group: ParameterGroup, hook: int) -> TrialRecord | None:
        """Return the newest trial of the hook, on this group if possible, else on the largest."""
        for known in (self._near(group, hook), self._of_hooks[hook]):
            newest = [each.trials[-1] for each in known if each.trials]
            if newest:
                return max(newest, key=lambda trial: trial.elements)
        return None

    def local_cost(self, hook: int) -> Cost:
        """Return the local seconds of a run of a hook, and per element.

        Samples of one size do not tell them apart: then half of the time counts for each, until the
        hook has run on whole groups.
        """
        trials = [trial for known in self._of_hooks[hook] for trial in known.trials]
        points = [Point(1.0, t.elements, math.fsum(t.local_seconds)) for t in trials]
        if hook == 0:
            every = [t for of_hook in self._of_hooks for known in of_hook for t in known.trials]
            points = [Point(1.0, t.elements, t.exact_seconds) for t in every]
        points += self._runs.get(hook, ())
        sizes = [point.bytes for point in points]
        if sizes and max(sizes) <= 2 * min(sizes):
            seconds = median(point.seconds for point in points)
            return Cost(seconds / 2, seconds / 2 / max(median(sizes), 1.0))
        return fit(points) or Cost(0.0, 0.0)

    def add_run(self, hook: int, elements: float, seconds: float) -> None:
        """Add the local seconds of a hook in use on a bucket."""
        self._runs.setdefault(hook, deque(maxlen=_KEPT)).append(Point(1.0, elements, seconds))

    def limit(self, layout: Layout, norms: Sequence[float], reference: int) -> float:
        """Return the error of the reference on the whole model, also on groups that stay exact.

        If all of them do, nothing is tried, and nothing may have an error.
        """
        if all(group.is_exact for group in layout.groups):
            return 0.0
        wrong = right = 0.0
        for group, norm in zip(layout.groups, norms, strict=True):
            right += norm**2
            wrong += (self.error(group, reference) * norm) ** 2
        return math.sqrt(wrong / right) if right else math.nan

    def to_json(self) -> list[list[dict[str, Any]]]:
        """Return what is known in JSON's types."""
        return [
            [
                {"names": k.names, "trials": [*map(asdict, k.trials)], "checks": [*k.checks]}
                for k in known
            ]
            for known in self._of_hooks
        ]

    def load(self, data: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Take over what :meth:`to_json` returned for the same hooks."""
        if len(data) != len(self._of_hooks):
            raise ValueError(f"expected {len(self._of_hooks)} hooks, found {len(data)}")
        self._of_hooks = [
            [
                _Known(
                    tuple(k["names"]),
                    deque(map(_trial, k["trials"]), _KEPT),
                    deque(k["checks"], _KEPT),
                )
                for k in known
            ]
            for known in data
        ]

    def _near(self, group: ParameterGroup, hook: int) -> list[_Known]:
        known = self._of_hooks[hook]
        names = set(group.names)
        own = [each for each in known if each.names == group.names]
        return own or [each for each in known if names.intersection(each.names)] or known


def _trial(data: Mapping[str, Any]) -> TrialRecord:
    return TrialRecord(**{**data, "stages": tuple(Stage(**stage) for stage in data["stages"])})
