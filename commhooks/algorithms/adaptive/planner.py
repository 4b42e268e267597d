"""What rank 0 knows and decides for ``auto``. It has no hooks and moves no gradients.

::

    look    some steps are timed, and the link is probed    could a hook save enough? ─ no ─► exact
    try     each candidate on samples of some groups        solve() ─► a plan
    check   as look, with the errors of the hooks in use    a reason for another plan? ─► try, solve

    Agenda ── each rank measures ──► Reports ── Planner.decide() on rank 0 ──► Course of all ranks
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from commhooks.algorithms.adaptive.link import (
    ALL,
    Probe,
    backend_of,
    link_of,
    network_of,
    probe_elements,
)
from commhooks.costs.step_trace import Collective, StepTrace
from commhooks.planning import Choice, Group, Plan, Problem, solve
from commhooks.planning.problem import overheads_of, relative
from commhooks.planning.solver import LEAST_SAVING, plan_of, without_contention

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
_PLAIN = Choice((0.0, 0.0), (Collective("all_reduce", 4.0, ALL),), 0.0, elements=1)
"""Plain averaging of an element, until it was tried."""


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from, for ``size`` ranks on a backend. Hooks are given by specs."""

    hooks: Sequence[str]
    """Plain averaging first."""
    lossless: Set[str]
    limit: float | str
    """The limit of the error, or the hook that is tried as a reference."""
    size: int
    backend: str
    sent: Callable[[str, Sequence[str]], int | None] = lambda *_: None
    """Returns what a hook sends for some parameters, by its formula."""


@dataclass(frozen=True)
class Agenda:
    """What ranks measure in ``steps`` steps from ``start`` on. In the step after these they report.

    Either candidates are tried in all of them. Or steps are timed, and in the last one errors and
    norms are measured, and the link is probed. Groups are given by their positions.
    """

    start: int
    steps: int
    reason: str
    """Why it leads to a new plan, unless a check finds another reason."""
    trials: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """The hooks that are tried on groups."""
    checked: Sequence[int] = ()
    """The groups whose hooks in use have an error, which is measured."""
    probe: int = 0
    """Elements of each message of the probe."""

    @property
    def report(self) -> int:
        """The step in which ranks report."""
        return self.start + self.steps

    def is_trial(self, step: int) -> bool:
        """Return whether candidates are tried in this step."""
        return bool(self.trials) and self.start <= step < self.report

    def is_check(self, step: int) -> bool:
        """Return whether errors and norms are measured in this step, and the link."""
        return not self.trials and step == self.report - 1


@dataclass(frozen=True)
class Times:
    """The times of the steps of a rank."""

    step_seconds: float
    step: StepTrace
    """A step without hooks; for each bucket the time since the launch of the one before it."""
    cores: float


@dataclass
class Report:
    """What a rank has measured. Groups are given by their positions."""

    spent_seconds: float = 0.0
    """Taken by measuring."""
    times: Times | None = None
    probe: Probe | None = None
    outcomes: dict[tuple[int, str], Choice] = field(default_factory=dict)
    """Results of trials, by group and hook."""
    errors: dict[int, float] = field(default_factory=dict)
    """Errors of the hooks in use, by group; as :attr:`norms`, the same on all ranks."""
    norms: dict[int, float] = field(default_factory=dict)
    """Norms of the averages, by group."""


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
class Course:
    """What all ranks have agreed on."""

    plan: Plan | None = None
    history: tuple[Decision, ...] = ()
    agenda: Agenda | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the plan and of the link, as measured last."""

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers about the plan in use and the link."""
        plan, known = self.plan, {"plans": float(len(self.history))}
        if plan is not None:
            predicted = plan.after.step_seconds
            known |= {"error": plan.error, "limit": plan.limit, "predicted_seconds": predicted}
        return {**known, **self.measured}

    @property
    def last_change(self) -> int:
        """The step of the last plan with other hooks than the one before it."""
        return next((each.step for each in reversed(self.history) if each.changes), 0)

    def hook_of(self) -> dict[str, str]:
        """Return the hook of each parameter, nothing before the first plan: all are exact."""
        return {} if self.plan is None else self.plan.hook_of()

    def to_json(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, in JSON's types."""
        return {"plan": self.plan and self.plan.to_json(), "history": [*map(asdict, self.history)]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Course":
        """Read what :meth:`to_json` returned. Measuring begins again with the next buckets."""
        plan = data["plan"] and Plan.from_json(data["plan"])
        return cls(plan, tuple(Decision(**each) for each in data["history"]))


class Planner:
    """What all ranks have reported about the groups of some buckets, and what to do by it.

    ``model_bytes``: those of the buckets. ``replan``: steps after which there is a new plan.
    """

    def __init__(
        self, candidates: Candidates, groups: Sequence[Group], model_bytes: int, *, replan: int
    ) -> None:
        self.candidates = candidates
        self.groups = groups
        self._plain = candidates.hooks[0]
        self._model_bytes = model_bytes
        self._replan = replan
        self._regular = f"{replan} steps since the last plan"
        self._spent_seconds = 0.0
        self._times: Times | None = None
        self._link: Probe | None = None
        self._outcomes: dict[tuple[int, str], Choice] = {}
        self._errors: dict[tuple[int, str], float] = {}
        """Errors of hooks in use, by group and hook: they count more than those of trials."""
        self._norms: dict[int, float] = {}

    def begin(self, course: Course, step: int) -> Course:
        """Return the course from ``step`` on, if nothing has been measured yet."""
        reason = "new buckets, or a resumed run" if course.history else "the first plan"
        return replace(course, agenda=self._check(course, step, reason))

    def decide(self, reports: Sequence[Report], course: Course, step: int) -> Course:
        """Return the course from the next step on, by what all ranks have reported."""
        agenda = course.agenda
        assert agenda is not None
        self._take(reports, course)
        problem = self._problem(course)
        if problem is None or (agenda.trials and not self._outcomes):
            # Gradients were not finite, or a rank has not seen the steps.
            return replace(course, agenda=replace(agenda, start=step + 1))
        reason = agenda.reason
        if not agenda.trials:
            since = step - course.history[-1].step if course.history else self._replan
            if self._outcomes:
                reason = self._why_new(problem, course, since)
                if not reason:
                    period = min(self._period(course, step), self._replan - since)
                    return self._go_on(problem, course, step, period)
            if (since >= self._replan or not self._outcomes) and (trials := self._trials()):
                if self._outcomes or not (why := self._why_exact(problem, course)):
                    return replace(course, agenda=Agenda(step + 1, _TRIED, reason, trials))
                exact = plan_of(problem, problem.uniform(problem.plain), why)
                return self._change(problem, course, exact, step, reason)
        return self._change(problem, course, solve(problem, course.hook_of()), step, reason)

    # --------------------------------------------------------------------------- what is known

    def _take(self, reports: Sequence[Report], course: Course) -> None:
        """Learn from the reports of all ranks. Of times, those of the slowest rank count."""
        own, hooks = reports[0], self._hooks_of(course)
        times = [report.times for report in reports if report.times is not None]
        self._times = max(
            times, key=lambda it: (it.step.backward_seconds, it.step_seconds), default=self._times
        )
        self._spent_seconds = max(report.spent_seconds for report in reports)
        self._link = link_of([r.probe for r in reports if r.probe], self._link)
        self._norms |= {i: norm for i, norm in own.norms.items() if math.isfinite(norm)}
        self._errors |= {(i, hooks[i]): e for i, e in own.errors.items() if math.isfinite(e)}
        for key in own.outcomes:
            known = [report.outcomes[key] for report in reports if key in report.outcomes]
            alike = {tuple(c.operation for c in outcome.collectives) for outcome in known}
            is_finite = all(math.isfinite(outcome.error) for outcome in known)
            if len(known) == len(reports) and len(alike) == 1 and is_finite:
                self._outcomes[key] = max(known, key=lambda outcome: outcome.seconds)

    def _problem(self, course: Course) -> Problem | None:
        """Return the problem of choosing now; None if times, norms or the link are not known."""
        candidates, link, times = self.candidates, self._link, self._times
        if link is None or times is None or len(self._norms) < max(len(self.groups), 1):
            return None
        overheads = overheads_of(self._outcomes, candidates.hooks)
        groups = (
            replace(group, norm=self._norms[i], choices=dict(self._choices(i, overheads)))
            for i, group in enumerate(self.groups)
        )
        problem = Problem(
            overheads,
            tuple(groups),
            times.step,
            network_of(link, candidates.size),
            backend_of(candidates.backend, link.byte_cpu_seconds),
            times.cores,
            self._limit(course),
        )
        return without_contention(problem, course.hook_of())

    def _choices(self, group: int, overheads: Mapping[str, float]) -> Iterator[tuple[str, Choice]]:
        own, candidates = self.groups[group], self.candidates
        for hook in [self._plain] if own.is_exact else candidates.hooks:
            tried = [each for (_, its), each in self._outcomes.items() if its == hook]
            tried += [_PLAIN] if hook == self._plain else []
            if not tried:
                continue
            largest = max(tried, key=lambda outcome: outcome.elements)
            outcome = self._outcomes.get((group, hook), largest)
            sent = None  # as for the elements, unless the hook has a formula
            formula = candidates.sent(hook, own.names)
            wire = math.fsum(each.wire_bytes(candidates.size) for each in outcome.collectives)
            if formula is not None and wire > 0:  # some rows do not show a low rank's bytes
                sent = formula / wire
            scaled = outcome.scaled(own.elements, overheads[hook], sent)
            yield hook, replace(scaled, error=self._error(group, hook))

    def _error(self, group: int, hook: str) -> float:
        """Return the relative error of a hook on a group; infinity if the hook was never tried.

        Until it is measured there, the mean of other groups, and at least what it has lost on those
        where it was in use.
        """
        if hook in self.candidates.lossless:
            return 0.0
        if (group, hook) in self._errors:
            return self._errors[group, hook]
        lost = [error for (_, its), error in self._errors.items() if its == hook]
        tried = [it.error for (_, its), it in self._outcomes.items() if its == hook]
        if (own := self._outcomes.get((group, hook))) is not None:
            tried = [own.error]
        return max((fmean(each) for each in (lost, tried) if each), default=math.inf)

    def _limit(self, course: Course) -> float:
        """Return the limit: of a reference, its error on the whole model, also where it is exact.

        That of the plan in use while the reference was not tried.
        """
        reference, norms = self.candidates.limit, self._norms
        if not isinstance(reference, str):
            return reference
        if not any(hook == reference for _, hook in self._outcomes):
            return 0.0 if course.plan is None else course.plan.limit
        errors = [self._error(i, reference) for i in range(len(self.groups))]
        squares = ((error * norms[i]) ** 2 for i, error in enumerate(errors))
        return relative(squares, norms.values())

    def _hooks_of(self, course: Course) -> list[str]:
        """Return the hook in use of each group."""
        hook_of = course.hook_of()
        return [hook_of.get(group.names[0], self._plain) for group in self.groups]

    # --------------------------------------------------------------------------- what is decided

    def _go_on(self, problem: Problem, course: Course, step: int, period: int) -> Course:
        """Return the course with a check whose report is about ``period`` steps later."""
        assert self._link is not None
        assert self._times is not None
        found = {
            "link_megabits_per_second": 8e-6 / max(self._link.byte_seconds, 1e-15),
            "link_round_microseconds": self._link.round_seconds * 1e6,
            "step_seconds": self._times.step_seconds,
            "limit": problem.error,
        }
        if (used := problem.assignment(course.hook_of())) is not None:
            found["error"] = problem.error_of(used)
        agenda = self._check(course, step + max(period - _TIMED, 2), self._regular)
        return replace(course, agenda=agenda, measured=found)

    def _change(
        self, problem: Problem, before: Course, plan: Plan, step: int, reason: str
    ) -> Course:
        assert self._link is not None
        hooks, plain = before.hook_of(), problem.plain
        changes = sum(hooks.get(n, plain) != hook for n, hook in plan.hook_of().items())
        seconds = plan.after.step_seconds, self._link.byte_seconds
        decision = Decision(step, reason, changes, plan.error, plan.limit, *seconds)
        course = replace(before, plan=plan, history=(*before.history, decision))
        # Nothing is measured for a long time if it cannot pay.
        period = self._period(course, step) if self._outcomes else self._replan
        return self._go_on(problem, course, step, period)

    def _why_exact(self, problem: Problem, course: Course) -> str:
        """Return why no hook can save enough, an empty text if one may."""
        sending = math.fsum(problem.costs(g, problem.plain)[1] for g in problem.groups)
        assert self._times is not None
        share = sending / self._times.step_seconds
        if share >= LEAST_SAVING or (course.plan is not None and course.plan.error > 0):
            return ""
        return (
            f"Average exactly: a hook that sends nothing saves {share:.1%} of a step, and a plan "
            f"has to save {LEAST_SAVING:.0%}."
        )

    def _why_new(self, problem: Problem, course: Course, since: int) -> str:
        """Return why to make a new plan ``since`` steps after the last one, or an empty text."""
        assert self._link is not None
        used, limit = problem.assignment(course.hook_of()), problem.error
        error = math.inf if used is None else problem.error_of(used)
        if error > _BEYOND_LIMIT * limit:
            return f"the error of the plan is {error:.3g}, its limit {limit:.3g}"
        before, now = course.history[-1].byte_seconds, self._link.byte_seconds
        if abs(now - before) > _OTHER_RATE * before:
            rates = (8e-6 / max(each, 1e-15) for each in (before, now))
            return "the link changed from {:.4g} to {:.4g} Mbit/s".format(*rates)
        return self._regular if since >= self._replan else ""

    def _check(self, course: Course, start: int, reason: str) -> Agenda:
        """Time steps, probe the link, and compare what the lossy hooks in use return."""
        hooks = enumerate(self._hooks_of(course))
        lossy = [i for i, hook in hooks if hook not in self.candidates.lossless]
        probe = probe_elements(self._link, self._model_bytes, self.candidates.size)
        return Agenda(start, _TIMED + 1, reason, checked=lossy, probe=probe)

    def _trials(self) -> dict[int, list[str]]:
        """Return the candidates for the largest groups, and for those of most norm the reference.

        Of groups that stay exact, only the reference is tried.
        """
        groups, hooks, limit = self.groups, list(self.candidates.hooks), self.candidates.limit
        reference = [limit] if isinstance(limit, str) else []
        free = [i for i, group in enumerate(groups) if not group.is_exact and len(hooks) > 1]
        free = sorted(free, key=lambda i: -groups[i].elements)[:_MOST_TRIED]
        fixed = [i for i, group in enumerate(groups) if group.is_exact and free and reference]
        fixed = sorted(fixed, key=lambda i: -self._norms.get(i, 0.0))[: _MOST_TRIED // 2]
        every = [*hooks, *(hook for hook in reference if hook not in hooks)]
        return {i: every if i in free else reference for i in sorted([*free, *fixed])}

    def _period(self, course: Course, step: int) -> int:
        """Return the steps until the next check, such that checks take 1 % of the time."""
        assert self._times is not None
        period = math.ceil(self._spent_seconds / (_SHARE * self._times.step_seconds))
        hooks = set(course.hook_of().values())
        period = max(period, _NATIVE_CHECK if len(hooks) == 1 else _FIRST_CHECK)
        if course.plan is not None and course.plan.error > 0:  # which grows after a change
            period = min(period, max(step - course.last_change, _FIRST_CHECK))
        return min(period, self._replan)
