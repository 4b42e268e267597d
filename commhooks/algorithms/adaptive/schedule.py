"""Which step of the training measures what: the same on all ranks, because it is arithmetic."""

import math
from dataclasses import dataclass, replace

__all__ = ["Schedule"]

TRIAL_SHARE = 0.01
REPORT_SHARE = 0.005
"""Shares of the time of training. With what planning takes, they stay below 2 %."""
_STEPS_OF_BURST = 3
"""Until the first report, the step with the trials included."""
_LEAST_STEPS_PER_REPORT = 10
_LEAST_STEPS_PER_TRIAL = 4
_MOST_STEPS = 1000


@dataclass(frozen=True)
class Schedule:
    """Trials and reports of the steps from ``start`` on.

    First a ``burst`` of trials in one step, so that there is a first plan soon, some steps without
    any, for their times, and a report. From then on a trial every ``trial_every`` steps and a
    report every ``report_every``, never both in one step.
    """

    start: int
    burst: int = 0
    """The number of trials in the first step; 0 if that is a step as any other."""
    trials_before: int = 0
    """The number of trials before ``start``."""
    trial_every: int = _LEAST_STEPS_PER_TRIAL
    report_every: int = _LEAST_STEPS_PER_REPORT

    def trials(self, step: int) -> range:
        """Return the numbers of the trials in this step."""
        if step == self.start:
            return range(self.trials_before, self.trials_before + self.burst)
        since = self._since_burst(step)
        if since <= 0 or since % self.trial_every or self.reports(step):
            return range(0)
        number = self.trials_before + self.burst + since // self.trial_every - 1
        return range(number, number + 1)

    def reports(self, step: int) -> bool:
        """Return whether ranks report in this step what they have measured in earlier ones."""
        since = self._since_burst(step)
        return since >= 0 and since % self.report_every == 0 and step > self.start

    def _since_burst(self, step: int) -> int:
        return step - self.start - (_STEPS_OF_BURST if self.burst else 0)

    def paced(
        self, step: int, *, step_seconds: float, trial_seconds: float, report_seconds: float
    ) -> "Schedule":
        """Return the schedule from ``step`` on, at what trials, reports and steps take.

        Seconds that are not known are NaN, and change nothing.
        """
        number = sum(len(self.trials(s)) for s in range(self.start, step))
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
