"""Why and when there is a new plan."""

from dataclasses import dataclass

from commhooks.algorithms.adaptive.fit import Cost

__all__ = ["Basis", "Decision"]

_OTHER_RATE = 0.2
_OTHER_NORM = 0.5


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

    def __str__(self) -> str:
        return (
            f"{self.reason}. {self.changes} parameters change their hook; error {self.error:.3g} "
            f"of at most {self.limit:.3g}, predicted {self.predicted_seconds * 1e3:.1f} ms a step"
        )


@dataclass(frozen=True)
class Basis:
    """What the plan in use was made for."""

    step: int
    link: Cost
    norm: float
    limit: float
    error: float
    """Of the plan, as last sampled."""
    trials: int
    """Trials completed when the plan was made."""

    def reason(self, link: Cost, norm: float, trials: int, step: int, replan: int) -> str | None:
        """Return why to make a new plan for what is known now, or None."""
        if _differs(link.per_byte, self.link.per_byte, _OTHER_RATE):
            rates = (8e-6 / max(cost.per_byte, 1e-15) for cost in (self.link, link))
            return "the link changed from {:.4g} to {:.4g} Mbit/s".format(*rates)
        if _differs(norm, self.norm, _OTHER_NORM):
            return f"the norm of the gradient changed from {self.norm:.3g} to {norm:.3g}"
        if trials >= 2 * max(self.trials, 1):
            return f"{trials} trials, twice as many as for the last plan"
        if step - self.step >= replan:
            return f"{replan} steps since the last plan"
        return None


def _differs(now: float, before: float, share: float) -> bool:
    return abs(now - before) > share * before
