"""Periodic reports, gathered so that all ranks plan from the same data.

Each rank sends a list of numbers. Its length follows from what all ranks agree on, and so does the
meaning of each place. NaN stands for what a rank does not know.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from torch import Tensor

from commhooks.algorithms.adaptive import link
from commhooks.algorithms.adaptive.link import Estimate, LinkTimes
from commhooks.algorithms.adaptive.trial import Outcome, relative_error

__all__ = ["Agreed", "Stage", "TrialRecord", "Window", "combine"]

_OPERATIONS = (
    "all_reduce",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "broadcast",
    "exchange",
    "push",
)
_MOST_STAGES = 6
_TRIAL = 3 + 3 * _MOST_STAGES + 2
"""Numbers of a trial: error, elements, stages; then those of each stage."""


@dataclass(frozen=True)
class Stage:
    """A collective of a trial, and the local work before it."""

    local_seconds: float
    operation: str
    wire_bytes: float


@dataclass(frozen=True)
class TrialRecord:
    """What all ranks know of a trial."""

    error: float
    elements: int
    stages: tuple[Stage, ...]
    last_seconds: float
    """The local work after the last collective."""
    exact_seconds: float
    """The local work of the exact average."""

    @property
    def local_seconds(self) -> tuple[float, ...]:
        return *(stage.local_seconds for stage in self.stages), self.last_seconds


@dataclass(frozen=True)
class Agreed:
    """What follows from the reports of all ranks. Seconds that nobody knows are NaN."""

    digests: tuple[int, ...]
    """Of each rank's plan."""
    step_seconds: float
    forward_seconds: float
    trial_seconds: float
    report_seconds: float
    planning_seconds: float
    probe_seconds: float
    cores: float
    launches: tuple[float, ...]
    """For each bucket, from the launch of the one before it."""
    link: Estimate | None
    """From the collectives of steps."""
    probe: Estimate | None
    """From probes; see link_watch.py."""
    byte_cpu_seconds: float
    """Of a core, for sending and receiving a byte in a probe."""
    norms: tuple[float, ...]
    """Of the average of each group."""
    errors: tuple[float, ...]
    """Of the hook in use on each group."""
    runs: tuple[tuple[float, float], ...]
    """Of each hook that was used: the elements of a bucket and the local seconds, in the mean."""
    trials: tuple[TrialRecord | None, ...]


@dataclass
class Window:
    """What this rank has measured since the last report."""

    links: LinkTimes
    probes: LinkTimes
    steps: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)
    launches: dict[int, list[float]] = field(default_factory=dict)
    trial_seconds: list[float] = field(default_factory=list)
    report_seconds: list[float] = field(default_factory=list)
    probe_seconds: list[float] = field(default_factory=list)
    byte_cpu_seconds: list[float] = field(default_factory=list)
    runs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Elements and local seconds of each run, by the position of the hook."""
    squares: dict[int, Tensor] = field(default_factory=dict)
    """Of the norms of the averages, by group."""
    checks: dict[int, Tensor] = field(default_factory=dict)
    """Of the norms of the error and of the exact average of the hook in use, by group."""
    check_seconds: list[float] = field(default_factory=list)
    trials: dict[int, Outcome] = field(default_factory=dict)
    """By number."""

    def clear(self) -> None:
        """Begin again."""
        self.clear_times()
        self.squares.clear()
        self.checks.clear()
        self.trials.clear()

    def clear_times(self) -> None:
        """Begin again with all times."""
        self.links.clear()
        self.probes.clear()
        own = (self.trial_seconds, self.report_seconds, self.probe_seconds, self.check_seconds)
        for values in (self.steps, self.forwards, self.byte_cpu_seconds, *own):
            values.clear()
        self.launches.clear()
        self.runs.clear()

    def encode(
        self,
        *,
        digest: int,
        cores: float,
        planning_seconds: float,
        buckets: int,
        groups: int,
        hooks: int,
        trials: Sequence[int],
    ) -> list[float]:
        """Return the numbers that this rank sends. Waits for the device."""
        squares = {i: float(value) for i, value in self.squares.items()}
        errors = {i: relative_error(*value.tolist()) for i, value in self.checks.items()}
        return [
            float(digest),
            _median(self.steps),
            _median(self.forwards),
            _median(self.trial_seconds),
            _median(self.report_seconds) + sum(self.check_seconds),
            planning_seconds,
            sum(self.probe_seconds),
            cores,
            *(_median(self.launches.get(i, ())) for i in range(buckets)),
            *self.links.encode(),
            *self.probes.encode(),
            min(self.byte_cpu_seconds, default=math.nan),
            *(math.sqrt(squares.get(i, math.nan)) for i in range(groups)),
            *(errors.get(i, math.nan) for i in range(groups)),
            *(number for i in range(hooks) for number in _mean_run(self.runs.get(i, ()))),
            *(number for trial in trials for number in _encode_trial(self.trials.get(trial))),
        ]


def combine(
    rows: Sequence[Sequence[float]], *, buckets: int, groups: int, hooks: int, trials: int
) -> Agreed:
    """Return what the numbers of all ranks say together."""
    take = _Reader(rows)
    digests = tuple(int(value) for value in take(1)[0])
    step, forward = _each(take(2), max)
    trial, report, planning, probes, cores = _each(take(5), min)
    return Agreed(
        digests=digests,
        step_seconds=step,
        forward_seconds=forward,
        trial_seconds=trial,
        report_seconds=report,
        planning_seconds=planning,
        probe_seconds=probes,
        cores=cores,
        launches=tuple(_each(take(buckets), max)),
        link=link.fit_link(_rows(take)),
        probe=link.fit_link(_rows(take), is_probe=True),
        byte_cpu_seconds=_each(take(1), min)[0],
        norms=tuple(_each(take(groups), max)),
        errors=tuple(_each(take(groups), max)),
        runs=tuple(_pair(_each(take(2), max)) for _ in range(hooks)),
        trials=tuple(_trial(take(_TRIAL)) for _ in range(trials)),
    )


def _rows(take: "_Reader") -> list[tuple[float, ...]]:
    return list(zip(*take(link.NUMBERS), strict=True))


class _Reader:
    """Returns the next numbers: for each place, those of all ranks."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self._columns: Iterator[tuple[float, ...]] = iter(zip(*rows, strict=True))

    def __call__(self, count: int) -> list[tuple[float, ...]]:
        return [next(self._columns) for _ in range(count)]


def _each(
    columns: Sequence[Sequence[float]], choose: Callable[[Sequence[float]], float]
) -> list[float]:
    return [choose([v for v in c if v == v] or [math.nan]) for c in columns]


def _pair(values: Sequence[float]) -> tuple[float, float]:
    return values[0], values[1]


def _mean_run(runs: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the means of elements and seconds; NaN if there is no run."""
    if not runs:
        return math.nan, math.nan
    return fmean(elements for elements, _ in runs), fmean(seconds for _, seconds in runs)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def _encode_trial(outcome: Outcome | None) -> list[float]:
    if outcome is None or len(outcome.hook.collectives) > _MOST_STAGES:
        return [math.nan] * _TRIAL
    stages: list[float] = []
    for collective, local_ns in zip(outcome.hook.collectives, outcome.hook.local_ns, strict=False):
        operation = _OPERATIONS.index(collective.operation)
        stages += [local_ns * 1e-9, float(operation), float(collective.wire_bytes)]
    return [
        outcome.error,
        float(outcome.elements),
        float(len(outcome.hook.collectives)),
        *stages,
        *[0.0] * (3 * _MOST_STAGES - len(stages)),
        outcome.hook.local_ns[-1] * 1e-9,
        sum(outcome.exact.local_ns) * 1e-9,
    ]


def _trial(columns: Sequence[Sequence[float]]) -> TrialRecord | None:
    """Return a trial that all ranks have finished, with the same collectives; else None."""
    counts = set(columns[2])
    if any(v != v for column in columns[:3] for v in column) or len(counts) > 1:
        return None
    slowest = [max(column) for column in columns]
    stages = [
        Stage(slowest[i], _OPERATIONS[int(slowest[i + 1])], slowest[i + 2])
        for i in range(3, 3 + 3 * int(slowest[2]), 3)
    ]
    return TrialRecord(slowest[0], int(slowest[1]), tuple(stages), *slowest[-2:])
