"""What ranks tell each other: reports of what was measured, and the instructions of rank 0."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from commhooks.algorithms.adaptive.link import Probe
from commhooks.planning import Outcome, Plan

__all__ = ["Agenda", "Decision", "Instructions", "Report"]


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
    """What ranks measure in the steps from ``start`` on, before that in which they ``report``.

    Either candidates are tried in all of them; or steps are timed, and in the last one errors and
    norms are measured, and the link is probed.
    """

    start: int
    report: int
    trials: Sequence[int] = ()
    """The positions of the groups that candidates are tried on."""
    probe: int = 0
    """Elements of each message of the probe."""

    def is_trial(self, step: int) -> bool:
        """Return whether candidates are tried in this step."""
        return bool(self.trials) and self.start <= step < self.report

    def is_timed(self, step: int) -> bool:
        """Return whether the times of this step count."""
        return not self.trials and self.start <= step < self.report

    def is_last(self, step: int) -> bool:
        """Return whether this is the last step before the report: errors count in it."""
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
class Report:
    """What a rank has measured on an agenda. Pairs are of the position of a group and a number."""

    cores: float = 1.0
    spent_seconds: float = 0.0
    """Taken by measuring."""
    step_seconds: float = math.nan
    forward_seconds: float = math.nan
    launches: list[float] = field(default_factory=list)
    """For each bucket, from the launch of the one before it."""
    probe: Probe | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    """Of the trials."""
    errors: list[tuple[int, float]] = field(default_factory=list)
    """Of the hooks in use."""
    norms: list[tuple[int, float]] = field(default_factory=list)
    """Of the averages."""
