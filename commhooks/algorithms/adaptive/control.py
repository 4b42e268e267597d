"""What ``auto`` decides, and when ranks measure what. It has no hooks and moves no gradients.

::

    look    some steps are timed, and the link is probed    could a hook save enough? ─ no ─► exact
    try     each candidate on samples of some groups        solve() ─► a plan
    check   as look, with the errors of the hooks in use    a reason for another plan? ─► try, solve

Each of these is an :class:`Agenda`, which ends with a report: see Note [One plan] in agreement.py.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commhooks.algorithms.adaptive.groups import Buckets
from commhooks.algorithms.adaptive.knowledge import Candidates, Knowledge, Report
from commhooks.algorithms.adaptive.link import probe_elements
from commhooks.planning import Group, Plan, Problem, solve
from commhooks.planning.solver import LEAST_SAVING, plan_of

_LOG = logging.getLogger("commhooks")
_TIMED = 3
"""Steps whose times are taken before a check."""
_TRIED = 8
"""Steps in which candidates are tried: their errors grow with what they have not sent."""
_FIRST_CHECK = 10
"""Steps after a change of hooks. Errors may grow for more steps than those of a trial: until checks
are far enough apart, each comes after twice as many steps as the one before it."""
_NATIVE_CHECK = 100
"""Steps between checks of a plan that may run in C++, which checks interrupt."""
_SHARE = 0.01
"""Checks and reports take at most this part of the time."""
_MOST_TRIED = 4
"""Groups that the candidates are tried on, the largest ones."""
_BEYOND_LIMIT = 1.1
"""More than a check, which sees some elements of each group, is off by."""
_OTHER_RATE = 0.2


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

    Either candidates are tried in all of them. Or steps are timed, and in the last one errors and
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

    def is_check(self, step: int) -> bool:
        """Return whether errors and norms are measured in this step, and the link."""
        return not self.trials and step == self.report - 1


@dataclass(frozen=True)
class Instructions:
    """What rank 0 has decided."""

    agenda: Agenda
    metrics: Mapping[str, float]
    """What rank 0 knows about the plan in use and the link."""
    plan: Plan | None = None
    """A new plan, None if the present one stays."""
    decision: Decision | None = None
    """Why there is a new plan."""


class Controller:
    """Decides on rank 0 by what ranks have reported. On all ranks, has what was decided."""

    def __init__(self, candidates: Candidates, *, replan: int) -> None:
        self.candidates = candidates
        self.plan: Plan | None = None
        self.history: list[Decision] = []
        self.groups: tuple[Group, ...] = ()
        self.agenda: Agenda | None = None
        self.known = Knowledge(candidates)
        self.buckets: Buckets = ()
        self._replan = replan
        self._metrics: Mapping[str, float] = {}
        self._reason = ""

    def use_buckets(self, buckets: Buckets, groups: Sequence[Group], step: int) -> None:
        """Measure from ``step`` on: the same buckets came twice."""
        self.buckets, self.groups = buckets, tuple(groups)
        self.known = Knowledge(self.candidates, buckets, self.groups)
        self._reason = "new buckets, or a resumed run" if self.history else "the first plan"
        self.agenda = self._check(step)

    def groups_of(self, names: Iterable[str]) -> dict[int, Group]:
        """Return the groups of a bucket by their positions."""
        of_bucket = set(names)
        return {i: g for i, g in enumerate(self.groups) if of_bucket.issuperset(g.names)}

    def is_lossy(self, group: int) -> bool:
        """Return whether the hook in use of a group has an error."""
        return not self.candidates.lossless[self._positions(self.plan)[group]]

    def hooks_to_try(self, group: int) -> Sequence[int]:
        """Return the hooks to try on a group; of groups that stay exact, only the reference."""
        if not self.groups[group].is_exact:
            return self.candidates.tried
        limit = self.candidates.limit
        return [limit] if isinstance(limit, int) else []

    def follow(self, instructions: Instructions) -> bool:
        """Follow what rank 0 has decided, and return whether there is a new plan."""
        self.agenda, self._metrics = instructions.agenda, instructions.metrics
        if instructions.plan is None or instructions.decision is None:
            return False
        self.plan = instructions.plan
        self.history.append(instructions.decision)
        _LOG.info("auto, step %d: %s", instructions.decision.step, instructions.decision)
        return True

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers about the plan in use, as last checked, and the link. The same on all ranks."""
        if (plan := self.plan) is None:
            return {**self._metrics}
        predicted = {"predicted_seconds": plan.after.step_seconds}
        return {"error": plan.error, "limit": plan.limit, **predicted, **self._metrics}

    def to_json(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, in JSON's types."""
        history = [vars(decision) for decision in self.history]
        return {"plan": self.plan and self.plan.to_json(), "history": history}

    def load(self, data: Mapping[str, Any]) -> None:
        """Take over what :meth:`to_json` returned. Measuring begins again with the next buckets."""
        self.plan = data["plan"] and Plan.from_json(data["plan"])
        self.history = [Decision(**decision) for decision in data["history"]]
        self.buckets, self.groups, self.agenda, self._metrics = (), (), None, {}

    # ------------------------------------------------------------------------------- on rank 0

    def decide(self, reports: Sequence[Report], step: int) -> Instructions:
        """Return what to do from the next step on, by what all ranks have reported."""
        assert self.agenda is not None
        known, has_tried = self.known, bool(self.agenda.trials)
        known.take(reports, self._positions(self.plan))
        problem = known.problem(self._limit(), self._hooks_in_use())
        if problem is None or (has_tried and not known.outcomes):
            # Gradients were not finite, or a rank has not seen the steps.
            return self._go_on(self._try(step + 1) if has_tried else self._check(step + 1))
        if not has_tried and known.outcomes:
            reason, since = self._why_new(step), step - self.history[-1].step
            if reason is None:
                period = self._period(self.plan, step - self._last_change)
                return self._go_on(self._later(step, min(period, self._replan - since)))
            self._reason = reason
            if since >= self._replan:
                return self._go_on(self._try(step + 1))
        elif not has_tried and (trials := self._try(step + 1)).trials:
            if why := self._why_exact(problem):
                return self._change(plan_of(problem, problem.exact, why), step)
            return self._go_on(trials)
        return self._change(solve(problem, self._hooks_in_use()), step)

    def _go_on(self, agenda: Agenda) -> Instructions:
        return Instructions(agenda, self._numbers(self.plan))

    def _change(self, plan: Plan, step: int) -> Instructions:
        assert self.known.link is not None
        before, unchanged = self._hooks_in_use(), self.candidates.specs[0]
        changes = sum(before.get(n, unchanged) != hook for n, hook in plan.hook_of().items())
        seconds = plan.after.step_seconds, self.known.link.byte_seconds
        decision = Decision(step, self._reason, changes, plan.error, plan.limit, *seconds)
        self._reason = f"{self._replan} steps since the last plan"
        period = self._replan  # nothing is measured for a long time if it cannot pay
        if self.known.outcomes:
            period = self._period(plan, 0 if changes else step - self._last_change)
        return Instructions(self._later(step, period), self._numbers(plan), plan, decision)

    def _why_exact(self, problem: Problem) -> str:
        """Return why no hook can save enough, an empty text if one may."""
        sending = math.fsum(map(problem.sending_seconds, problem.exact))
        share = sending / self.known.times.step_seconds
        if share >= LEAST_SAVING or (self.plan is not None and self.plan.error > 0):
            return ""
        return (
            f"Average exactly: a hook that sends nothing saves {share:.1%} of a step, and a plan "
            f"has to save {LEAST_SAVING:.0%}."
        )

    def _why_new(self, step: int) -> str | None:
        """Return why to make a new plan, or None."""
        assert self.known.link is not None
        error, limit = self.known.error_of(self._positions(self.plan)), self._limit()
        if error > _BEYOND_LIMIT * limit:
            return f"the error of the plan is {error:.3g}, its limit {limit:.3g}"
        before, now = self.history[-1].byte_seconds, self.known.link.byte_seconds
        if abs(now - before) > _OTHER_RATE * before:
            rates = (8e-6 / max(each, 1e-15) for each in (before, now))
            return "the link changed from {:.4g} to {:.4g} Mbit/s".format(*rates)
        if step - self.history[-1].step >= self._replan:
            return f"{self._replan} steps since the last plan"
        return None

    def _check(self, start: int) -> Agenda:
        """Time steps, probe the link, and compare what the hooks in use return."""
        model_bytes = sum(nbytes for _, nbytes in self.buckets)
        probe = probe_elements(self.known.link, model_bytes, self.candidates.size)
        return Agenda(start, start + _TIMED + 1, probe=probe)

    def _later(self, step: int, period: int) -> Agenda:
        """Check such that the report is about ``period`` steps later."""
        return self._check(step + max(period - _TIMED, 2))

    def _try(self, step: int) -> Agenda:
        """Try the candidates on the largest groups, and the reference on those of most norm."""
        groups, candidates = dict(enumerate(self.groups)), self.candidates
        free = [i for i in groups if not groups[i].is_exact and any(candidates.tried)]
        chosen = sorted(free, key=lambda i: -groups[i].elements)[:_MOST_TRIED]
        if chosen and isinstance(candidates.limit, int):
            fixed = [i for i in groups if groups[i].is_exact]
            by_norm = sorted(fixed, key=lambda i: -self.known.norms.get(i, 0.0))
            chosen += by_norm[: _MOST_TRIED // 2]
        return Agenda(step, step + (_TRIED if chosen else 0), trials=sorted(chosen))

    def _period(self, plan: Plan | None, since: int) -> int:
        """Return the steps until the next check, such that checks take 1 % of the time.

        ``since``: steps since the hooks have changed, after which errors grow for a while.
        """
        times = self.known.times
        period = math.ceil(times.spent_seconds / (_SHARE * times.step_seconds))
        hooks = set() if plan is None else set(plan.hook_of().values())
        period = max(period, _NATIVE_CHECK if len(hooks) == 1 else _FIRST_CHECK)
        if plan is not None and plan.error > 0:
            period = min(period, max(since, _FIRST_CHECK))
        return min(period, self._replan)

    @property
    def _last_change(self) -> int:
        """The step of the last plan with other hooks than the one before it."""
        return next((each.step for each in reversed(self.history) if each.changes), 0)

    def _limit(self) -> float:
        return self.known.limit(0.0 if self.plan is None else self.plan.limit)

    def _hooks_in_use(self) -> dict[str, str]:
        """Return the hook of each parameter, nothing before the first plan: all are exact."""
        return {} if self.plan is None else self.plan.hook_of()

    def _positions(self, plan: Plan | None) -> list[int]:
        """Return the position of the hook of each group."""
        hook_of, specs = {} if plan is None else plan.hook_of(), list(self.candidates.specs)
        return [specs.index(hook_of.get(group.names[0], specs[0])) for group in self.groups]

    def _numbers(self, plan: Plan | None) -> dict[str, float]:
        """Return the metrics of a plan by what is known now."""
        known, found = self.known, dict[str, float]()
        if known.link is not None:
            found["link_megabits_per_second"] = 8e-6 / max(known.link.byte_seconds, 1e-15)
            found["link_round_microseconds"] = known.link.round_seconds * 1e6
        if plan is not None and len(known.norms) == len(self.groups):
            found |= {"error": known.error_of(self._positions(plan)), "limit": self._limit()}
        if known.times.step_seconds > 0:
            found["step_seconds"] = known.times.step_seconds
        return found
