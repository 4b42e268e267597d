"""Which step of the training measures what: the same on all ranks, because it is arithmetic."""

import math
from dataclasses import dataclass, replace

__all__ = ["Schedule"]

TRIAL_SHARE = 0.005
REPORT_SHARE = 0.01
"""Shares of the time of training, of reports with checks. With plans, they stay below 2 %."""
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
    report every ``report_every``, never both in one step. A new plan rests on trials, so it is
    checked soon.
    """

    start: int
    burst: int = 0
    """The number of trials in the first step; 0 if that is a step as any other."""
    trials_before: int = 0
    """The number of trials before ``start``."""
    last_trial: int = -_MOST_STEPS
    """The last step before ``start`` with a trial."""
    trial_every: int = _LEAST_STEPS_PER_TRIAL
    report_every: int = _LEAST_STEPS_PER_REPORT
    early_report: int = -1
    """A step with a report whatever the pace, for the check of a new plan."""

    def is_burst(self, step: int) -> bool:
        """Return whether this is the step with the burst of trials."""
        return self.burst > 0 and step == self.start

    def probes(self, step: int) -> bool:
        """Return whether the link is probed in this step, after that with the burst."""
        return self.burst > 0 and step == self.start + 1

    def trials(self, step: int) -> range:
        """Return the numbers of the trials in this step."""
        if self.is_burst(step):
            return range(self.trials_before, self.trials_before + self.burst)
        since = step - self._first_trial
        if since < 0 or since % self.trial_every or self.reports(step):
            return range(0)
        number = self.trials_before + self.burst + since // self.trial_every
        return range(number, number + 1)

    def reports(self, step: int) -> bool:
        """Return whether ranks report in this step what they have measured in earlier ones."""
        since = step - self._after_burst
        is_due = since >= 0 and since % self.report_every == 0 and step > self.start
        return is_due or step == self.early_report

    def with_new_plan(self, step: int) -> "Schedule":
        """Return the schedule with a check of the plan that is made in ``step``."""
        return replace(self, early_report=step + _LEAST_STEPS_PER_REPORT)

    @property
    def _after_burst(self) -> int:
        return self.start + (_STEPS_OF_BURST if self.burst else 0)

    @property
    def _first_trial(self) -> int:
        """Of those that come alone. It may have been due in an earlier step."""
        if self.burst:
            return self._after_burst + self.trial_every
        return max(self.start, self.last_trial + self.trial_every)

    def paced(
        self, step: int, *, step_seconds: float, trial_seconds: float, report_seconds: float
    ) -> "Schedule":
        """Return the schedule from ``step`` on, at what trials, reports and steps take.

        Seconds that are not known are NaN, and change nothing.
        """
        steps = [s for s in range(self.start, step) for _ in self.trials(s)]
        return replace(
            self,
            start=step,
            burst=0,
            trials_before=self.trials_before + len(steps),
            last_trial=steps[-1] if steps else self.last_trial,
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
