"""What ranks tell each other: reports of what was measured, and the instructions of rank 0."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from commhooks.planning import Plan

__all__ = ["Agenda", "Decision", "Instructions", "Probe", "Report", "TrialRecord"]


@dataclass(frozen=True)
class Decision:
    """A plan was made in this step, for this reason."""

    step: int
    reason: str
    changes: int
    """The number of parameters that got another hook."""
    error: float
    """Of the plan, as sampled."""
    limit: float
    predicted_seconds: float
    """Of a step."""
    byte_seconds: float
    """The time of a byte on the link that the plan was made for."""

    def __str__(self) -> str:
        return (
            f"{self.reason}. {self.changes} parameters change their hook; error {self.error:.3g} "
            f"of at most {self.limit:.3g}, predicted {self.predicted_seconds * 1e3:.1f} ms a step"
        )


@dataclass(frozen=True)
class Agenda:
    """What ranks measure from step ``start`` on, until they report."""

    start: int
    report: int
    """The step in which ranks report."""
    trials: Sequence[int] = ()
    """The positions of groups that candidates are tried on, one in each step."""
    probe: int = 0
    """The elements of each message of the probe, 0 if there is none."""

    def trial(self, step: int) -> int | None:
        """Return the group that candidates are tried on in this step."""
        since = step - self.start
        return self.trials[since] if 0 <= since < len(self.trials) else None

    def is_timed(self, step: int) -> bool:
        """Return whether the times of this step count."""
        return not self.trials and self.start <= step < self.report

    def is_checked(self, step: int) -> bool:
        """Return whether errors and norms are measured in this step, and the link is probed."""
        return step == self.report - 1


@dataclass(frozen=True)
class Instructions:
    """What rank 0 has decided."""

    agenda: Agenda
    plan: Plan | None = None
    """A new plan, None if the present one stays."""
    decision: Decision | None = None
    """Why there is a new plan."""


@dataclass
class Probe:
    """The costs of messages: seconds of a round, of a byte, and of a core for a byte."""

    round_seconds: float
    byte_seconds: float
    byte_cpu_seconds: float


@dataclass
class TrialRecord:
    """A trial. ``stages``: for each collective, the local seconds before it, and what it sends."""

    group: int
    hook: int
    error: float
    elements: int
    stages: list[tuple[float, str, float]]
    last_seconds: float
    """The local work after the last collective."""
    exact_seconds: float
    """The local work of the exact average."""

    @property
    def local_seconds(self) -> list[float]:
        return [*(seconds for seconds, *_ in self.stages), self.last_seconds]


@dataclass
class Report:
    """What a rank has measured on an agenda. Pairs are of a position and a number."""

    cores: float = 1.0
    spent_seconds: float = 0.0
    """What measuring has taken."""
    step_seconds: float = math.nan
    forward_seconds: float = math.nan
    launches: list[float] = field(default_factory=list)
    """For each bucket, from the launch of the one before it."""
    probe: Probe | None = None
    trials: list[TrialRecord] = field(default_factory=list)
    errors: list[tuple[int, float]] = field(default_factory=list)
    """Of the hooks in use, by group."""
    norms: list[tuple[int, float]] = field(default_factory=list)
    """Of the averages, by group."""
    runs: list[tuple[int, int, float]] = field(default_factory=list)
    """Of hooks in use: position, elements of the bucket, local seconds."""
