"""Which step of the training measures what: the same on all ranks, because it is arithmetic."""

import math
from dataclasses import dataclass, replace

__all__ = ["Schedule"]

TRIAL_SHARE = 0.01
REPORT_SHARE = 0.005
"""Shares of the time of training. With what planning takes, they stay below 2 %."""
_LEAST_STEPS_PER_REPORT = 10
_LEAST_STEPS_PER_TRIAL = 4
_MOST_STEPS = 1000


@dataclass(frozen=True)
class Schedule:
    """Trials and reports of the steps from ``start`` on.

    First a ``burst`` of trials, one in each step, so that there is a first plan soon. The report
    that ends it comes in the step after the burst. From then on a trial every ``trial_every`` steps
    and a report every ``report_every``, never both in one step.
    """

    start: int
    burst: int = 0
    trials_before: int = 0
    """The number of trials before ``start``."""
    trial_every: int = _LEAST_STEPS_PER_TRIAL
    report_every: int = _LEAST_STEPS_PER_REPORT

    def trial(self, step: int) -> int | None:
        """Return the number of the trial in this step, None if there is none."""
        t = step - self.start
        if 0 <= t < self.burst:
            return self.trials_before + t
        since = t - self.burst
        if since <= 0 or since % self.trial_every or self.reports(step):
            return None
        return self.trials_before + self.burst + since // self.trial_every - 1

    def reports(self, step: int) -> bool:
        """Return whether ranks report in this step what they have measured in earlier ones."""
        since = step - self.start - self.burst
        return since >= 0 and since % self.report_every == 0 and step > self.start

    def paced(
        self, step: int, *, step_seconds: float, trial_seconds: float, report_seconds: float
    ) -> "Schedule":
        """Return the schedule from ``step`` on, at what trials, reports and steps take.

        Seconds that are not known are NaN, and change nothing.
        """
        number = sum(self.trial(s) is not None for s in range(self.start, step))
        return replace(
            self,
            start=step,
            burst=0,
            trials_before=self.trials_before + number,
            trial_every=_every(
                trial_seconds, step_seconds, TRIAL_SHARE, _LEAST_STEPS_PER_TRIAL, self.trial_every
            ),
            report_every=_every(
                report_seconds,
                step_seconds,
                REPORT_SHARE,
                _LEAST_STEPS_PER_REPORT,
                self.report_every,
            ),
        )


def _every(seconds: float, step_seconds: float, share: float, least: int, present: int) -> int:
    if not (seconds >= 0 and step_seconds > 0):
        return present
    return min(max(math.ceil(seconds / (share * step_seconds)), least), _MOST_STEPS)
