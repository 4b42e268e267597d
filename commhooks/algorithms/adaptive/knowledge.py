"""What rank 0 knows by the reports of all ranks: the problem that a plan solves."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from commhooks.algorithms.adaptive.groups import Buckets
from commhooks.algorithms.adaptive.link import ALL, Probe, backend_of, link_of, network_of
from commhooks.costs.step_trace import BucketTrace, Collective, merged_work
from commhooks.planning import Choice, Group, Problem
from commhooks.planning.problem import overheads_of, squared_error
from commhooks.planning.solver import without_contention


@dataclass
class Report:
    """What a rank has measured. Groups and hooks are given by their positions."""

    cores: float = 1.0
    spent_seconds: float = 0.0
    """Taken by measuring."""
    step_seconds: float = math.nan
    forward_seconds: float = math.nan
    launches: Sequence[float] = ()
    """For each bucket, the seconds from the launch of the one before it."""
    probe: Probe | None = None
    outcomes: Mapping[tuple[int, int], Choice] = field(default_factory=dict)
    """Results of trials, by group and hook."""
    errors: Mapping[int, float] = field(default_factory=dict)
    """Errors of the hooks in use, by group."""
    norms: Mapping[int, float] = field(default_factory=dict)
    """Norms of the averages, by group."""


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from, for ``size`` ranks on a backend."""

    specs: Sequence[str]
    """The hooks, the exact one first."""
    lossless: Sequence[bool]
    tried: Sequence[int]
    """The positions of the hooks that are tried."""
    limit: float | int
    """The limit of the error, or the position of the hook that is tried as a reference."""
    size: int
    backend: str
    sent: Callable[[int, Sequence[str]], int | None] = lambda *_: None
    """Returns what a hook sends for some parameters, by its formula."""


class Knowledge:
    """Numbers about the groups of some buckets.

    ``in_use``, in all methods, has the position of the hook of each group, as the plan in use says.
    """

    def __init__(
        self, candidates: Candidates, buckets: Buckets = (), groups: Sequence[Group] = ()
    ) -> None:
        self.link: Probe | None = None
        self.times = Report()
        """Times of the slowest rank."""
        self.norms: dict[int, float] = {}
        self.outcomes: dict[tuple[int, int], Choice] = {}
        """Results of trials, by group and hook."""
        self._errors: dict[tuple[int, int], float] = {}
        """Errors of hooks in use, by group and hook: they count more than those of trials."""
        self.candidates = candidates
        self._buckets = buckets
        self._groups = groups

    def take(self, reports: Sequence[Report], in_use: Sequence[int]) -> None:
        """Learn from the reports of all ranks."""
        known = [report for report in reports if report.step_seconds > 0 and report.launches]
        if known:
            self.times = Report(
                cores=min(report.cores for report in reports),
                step_seconds=max(report.step_seconds for report in known),
                forward_seconds=max(report.forward_seconds for report in known),
                launches=list(map(max, zip(*(each.launches for each in known), strict=True))),
            )
        self.times.spent_seconds = max(report.spent_seconds for report in reports)
        self.link = link_of([r.probe for r in reports if r.probe], self.link)
        self.norms |= _largest(report.norms for report in reports)
        errors = _largest(report.errors for report in reports)
        self._errors |= {(i, in_use[i]): error for i, error in errors.items()}
        for key in reports[0].outcomes:
            slowest = _slowest([report.outcomes.get(key) for report in reports])
            if slowest is not None:
                self.outcomes[key] = slowest

    def problem(self, limit: float, in_use: Mapping[str, str]) -> Problem | None:
        """Return the problem of choosing now; None if times, norms or the link are not known.

        ``in_use``: the hook of each parameter when steps were timed.
        """
        norms = [self.norms.get(i, math.nan) for i in range(len(self._groups))]
        if self.link is None or not self.times.step_seconds > 0:
            return None
        if not norms or not all(map(math.isfinite, norms)):
            return None
        overheads = overheads_of(self.outcomes, len(self.candidates.specs))
        groups = (
            replace(group, norm=norms[i], choices=tuple(self._choices(i, overheads)))
            for i, group in enumerate(self._groups)
        )
        traces = zip(self.times.launches, self._buckets, strict=True)
        problem = Problem(
            hooks=tuple(self.candidates.specs),
            overheads=overheads,
            groups=tuple(groups),
            buckets=tuple(BucketTrace(nbytes, seconds, 0.0) for seconds, (_, nbytes) in traces),
            forward_seconds=self.times.forward_seconds,
            network=network_of(self.link, self.candidates.size),
            backend=backend_of(self.candidates.backend, self.link.byte_cpu_seconds),
            cores=self.times.cores,
            error=limit,
        )
        return without_contention(problem, in_use)

    def _choices(self, group: int, overheads: Sequence[float]) -> Iterator[Choice]:
        own, candidates = self._groups[group], self.candidates
        for hook, overhead in enumerate(overheads[:1] if own.is_exact else overheads):
            tried = [each for (_, i), each in self.outcomes.items() if i == hook]
            largest = max(tried, key=lambda outcome: outcome.elements, default=None)
            outcome = self.outcomes.get((group, hook), largest)
            if outcome is not None:
                sent = None  # as for the elements, unless the hook has a formula
                formula = candidates.sent(hook, own.names)
                wire = math.fsum(each.wire_bytes(candidates.size) for each in outcome.collectives)
                if formula is not None and wire > 0:  # some rows do not show a low rank's bytes
                    sent = formula / wire
                error = self._error(group, hook)
                yield replace(outcome.scaled(own.elements, overhead, sent), error=error)
            elif hook == 0:
                elements = sum(g.elements for g in self._groups if g.bucket == own.bucket)
                nbytes = self._buckets[own.bucket][1] * own.elements / max(elements, 1)
                yield Choice(0, (0.0, 0.0), (Collective("all_reduce", nbytes, ALL),), 0.0)

    def _error(self, group: int, hook: int) -> float:
        """Return the relative error of a hook on a group; infinity if the hook was never tried.

        Until it is measured there, the mean of other groups, and at least what it has lost on those
        where it was in use.
        """
        if self.candidates.lossless[hook]:
            return 0.0
        if (group, hook) in self._errors:
            return self._errors[group, hook]
        lost = [error for (_, i), error in self._errors.items() if i == hook]
        tried = [outcome.error for (_, i), outcome in self.outcomes.items() if i == hook]
        if (own := self.outcomes.get((group, hook))) is not None:
            tried = [own.error]
        return max((fmean(each) for each in (lost, tried) if each), default=math.inf)

    def error_of(self, in_use: Sequence[int]) -> float:
        """Return the error of a step's average with these hooks, by what is known now."""
        errors = [self._error(i, hook) for i, hook in enumerate(in_use)]
        return self._relative(
            squared_error(error, self.norms[i])
            for i, error in enumerate(errors)
            if error < math.inf or self.outcomes
        )

    def limit(self, unknown: float) -> float:
        """Return the limit: of a reference, its error on the whole model, also where it is exact.

        ``unknown``: the limit while a reference was not tried.
        """
        reference = self.candidates.limit
        if not isinstance(reference, int):
            return float(reference)
        if not any(hook == reference for _, hook in self.outcomes):
            return unknown
        errors = [self._error(i, reference) for i in range(len(self._groups))]
        return self._relative((error * self.norms[i]) ** 2 for i, error in enumerate(errors))

    def _relative(self, squares: Iterable[float]) -> float:
        right = math.fsum(norm**2 for norm in self.norms.values())
        return math.sqrt(math.fsum(squares) / right) if right else 0.0


def _largest(of_ranks: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Return the largest finite number of each position."""
    found: dict[int, float] = {}
    for i, value in (pair for numbers in of_ranks for pair in numbers.items()):
        if math.isfinite(value):
            found[i] = max(value, found.get(i, 0.0))
    return found


def _slowest(of_ranks: Sequence[Choice | None]) -> Choice | None:
    """Return an outcome with the longest times; None if ranks differ or it is not finite."""
    known = [outcome for outcome in of_ranks if outcome and math.isfinite(outcome.error)]
    alike = {tuple(c.operation for c in outcome.collectives) for outcome in known}
    if len(alike) != 1 or len(known) < len(of_ranks):
        return None
    error = max(outcome.error for outcome in known)
    return replace(merged_work(known, max, max), error=error)
