"""The knowledge and decisions of rank 0 for ``auto``. It has no hooks and moves no gradients.

::

    look    some steps are timed, and the link is probed    could a hook save enough? ─ no ─► exact
    try     each candidate on samples of some groups        solve() ─► a plan
    check   as look, with the errors of the hooks in use    a reason for another plan? ─► try, solve

    AgreedState ── each rank measures ──► Reports ── Planner.decide() on rank 0 ──► AgreedState
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from commhooks.algorithms.adaptive.link import ALL, UNKNOWN, Probe, link_of, probe_elements
from commhooks.costs.step_trace import Collective, StepTrace
from commhooks.planning import Choice, Group, Plan, Problem, solve
from commhooks.planning.problem import overhead_of, relative
from commhooks.planning.solver import LEAST_SAVING, make_plan, without_contention

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
"""A plan whose error exceeds the limit by this factor is rejected. Checks, which sample elements of
each group, are off by less."""
_OTHER_RATE = 0.2
_NO_PLAN = Plan.exact("Average exactly: nothing has been measured yet.")
_UNTIMED = StepTrace((), 0.0, is_native=False)
_UNTRIED = {0: Choice((0.0, 0.0), (Collective("all_reduce", 4.0, ALL),), 0.0, elements=1)}
"""Plain averaging of an element, until plain averaging was tried."""


@dataclass
class Report:
    """The measurements of a rank. Groups are given by their positions."""

    spent_seconds: float = 0.0
    """The time taken by measuring."""
    step: StepTrace = _UNTIMED
    """A step without hooks; for each bucket the time since the launch of the one before it."""
    step_seconds: float = 0.0
    """The time of a step with hooks."""
    cores: float = 1.0
    probe: Probe | None = None
    outcomes: dict[tuple[int, str], Choice] = field(default_factory=dict)
    """Results of trials, by group and hook."""
    errors: dict[tuple[int, str], float] = field(default_factory=dict)
    """Errors of hooks in use, by group and hook; as :attr:`norms`, the same on all ranks."""
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
    """The error of the plan, as sampled."""
    limit: float
    predicted_seconds: float
    """The predicted time of a step."""
    byte_seconds: float
    """The time of a byte on the link that the plan was made for."""

    def __str__(self) -> str:
        return (
            f"{self.reason}. {self.changes} parameters change their hook; error {self.error:.3g} "
            f"of at most {self.limit:.3g}, predicted {self.predicted_seconds * 1e3:.1f} ms a step"
        )


@dataclass(frozen=True)
class AgreedState:
    """The plan in use and the next measurement, the same on all ranks.

    They measure in some steps from ``start`` on, and report in the step after these. Either
    candidates are tried in all of them. Or steps are timed, and in the last one errors and norms
    are measured, and the link is probed.
    """

    plan: Plan = _NO_PLAN
    history: tuple[Decision, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=lambda: {"plans": 0.0})
    """Numbers about the plan in use and the link, as measured last."""
    start: int | None = None
    reason: str = ""
    """Why the report leads to a new plan, unless a check finds another reason."""
    trials: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """The hooks that are tried on groups, which are given by their positions."""
    probe: int = 0
    """Elements of each long message of the probe."""

    @property
    def report(self) -> int:
        """The step in which ranks report."""
        assert self.start is not None
        return self.start + (_TRIED if self.trials else _TIMED + 1)

    def is_trial(self, step: int) -> bool:
        """Return whether candidates are tried in this step."""
        return bool(self.trials) and self.report - _TRIED <= step < self.report

    def is_check(self, step: int) -> bool:
        """Return whether errors and norms are measured in this step, and the link."""
        return not self.trials and step == self.report - 1

    def to_json(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, in JSON's types. It measures again."""
        return asdict(AgreedState(self.plan, self.history, self.metrics))


@dataclass
class Planner:
    """The reports of all ranks about the groups of some buckets, and what to do by it.

    Hooks are given by specs.
    """

    groups: Sequence[Group]
    model_bytes: int
    """The bytes of the buckets."""
    hooks: Sequence[str]
    """The candidates, plain averaging first."""
    lossless: Set[str]
    limit: float | str
    """The limit of the error, or the hook that is tried as a reference."""
    size: int
    """The number of ranks."""
    backend: str
    replan: int
    """Steps after which there is a new plan."""
    sent: Callable[[str, Sequence[str]], int | None] = lambda *_: None
    """Returns what a hook sends for some parameters, by its formula."""

    def __post_init__(self) -> None:
        self._plain = self.hooks[0]
        self._regular = f"{self.replan} steps since the last plan"
        self._spent_seconds = 0.0
        self._slowest = Report()
        """The last report with times, of the slowest rank."""
        self._link = UNKNOWN
        self._outcomes: dict[str, dict[int, Choice]] = {}
        """Results of trials, by hook and group."""
        self._errors: dict[str, dict[int, float]] = {}
        """Errors of hooks in use, by hook and group: they count more than those of trials."""
        self._norms: dict[int, float] = {}

    def begin(self, agreed: AgreedState, step: int) -> AgreedState:
        """Return what to do from ``step`` on, if nothing has been measured yet."""
        reason = "new buckets, or a resumed run" if agreed.history else "the first plan"
        return self._check(agreed, step, reason)

    def lossy(self, agreed: AgreedState) -> list[tuple[int, str]]:
        """Return each group whose hook in use has an error, and the hook."""
        hooks = agreed.plan.hook_of()
        used = [(i, hooks.get(group.names[0], self._plain)) for i, group in enumerate(self.groups)]
        return [(i, hook) for i, hook in used if hook not in self.lossless]

    def decide(self, reports: Sequence[Report], agreed: AgreedState, step: int) -> AgreedState:
        """Return what to do from the next step on, by what all ranks have reported."""
        self._take(reports)
        problem = self._problem(agreed)
        if problem is None or (agreed.trials and not self._outcomes):
            # Gradients were not finite, or a rank has not seen the steps.
            return replace(agreed, start=step + 1)
        reason = agreed.reason
        if not agreed.trials:
            since = step - agreed.history[-1].step if agreed.history else self.replan
            if self._outcomes and not (reason := self._why_new(problem, agreed, since)):
                period = min(self._period(agreed, step), self.replan - since)
                return self._go_on(problem, agreed, step, period)
            if (since >= self.replan or not self._outcomes) and (trials := self._trials()):
                if self._outcomes or not (why := self._why_exact(problem, agreed)):
                    return replace(agreed, start=step + 1, reason=reason, trials=trials, probe=0)
                exact = make_plan(problem, problem.uniform(problem.plain), why)
                return self._change(problem, agreed, exact, step, reason)
        return self._change(problem, agreed, solve(problem, agreed.plan.hook_of()), step, reason)

    # --------------------------------------------------------------------------- what is known

    def _take(self, reports: Sequence[Report]) -> None:
        """Learn from the reports of all ranks. Of times, those of the slowest rank count."""
        own = reports[0]
        slowest = max(reports, key=lambda it: (it.step.backward_seconds, it.step_seconds))
        self._slowest = slowest if slowest.step.buckets else self._slowest
        self._spent_seconds = max(report.spent_seconds for report in reports)
        self._link = link_of([r.probe for r in reports if r.probe], self._link)
        self._norms |= {i: norm for i, norm in own.norms.items() if math.isfinite(norm)}
        for (i, hook), error in own.errors.items():
            if math.isfinite(error):
                self._errors.setdefault(hook, {})[i] = error
        for i, hook in own.outcomes:
            known = [r.outcomes[i, hook] for r in reports if (i, hook) in r.outcomes]
            alike = {tuple(c.operation for c in outcome.collectives) for outcome in known}
            is_finite = all(math.isfinite(outcome.error) for outcome in known)
            if len(known) == len(reports) and len(alike) == 1 and is_finite:
                longest = max(known, key=lambda outcome: outcome.seconds)
                self._outcomes.setdefault(hook, {})[i] = longest

    def _problem(self, agreed: AgreedState) -> Problem | None:
        """Return the problem of choosing now; None if times, norms or the link are not known."""
        link, step = self._link, self._slowest.step
        if link == UNKNOWN or not step.buckets or len(self._norms) < max(len(self.groups), 1):
            return None
        overheads = {h: overhead_of(self._outcomes.get(h, {}).values()) for h in self.hooks}
        groups = (
            replace(group, norm=self._norms[i], choices=dict(self._choices(i, overheads)))
            for i, group in enumerate(self.groups)
        )
        problem = Problem(
            overheads,
            tuple(groups),
            step,
            link.network(self.size),
            link.backend(self.backend),
            self._slowest.cores,
            self._limit(agreed),
        )
        return without_contention(problem, agreed.plan.hook_of())

    def _choices(self, group: int, overheads: Mapping[str, float]) -> Iterator[tuple[str, Choice]]:
        own = self.groups[group]
        for hook in [self._plain] if own.is_exact else self.hooks:
            if not (tried := self._outcomes.get(hook, _UNTRIED if hook == self._plain else {})):
                continue
            largest = max(tried.values(), key=lambda outcome: outcome.elements)
            outcome = tried.get(group, largest)
            formula = self.sent(hook, own.names)  # some rows do not show a low rank's bytes
            wire = math.fsum(each.wire_bytes(self.size) for each in outcome.collectives)
            sent = formula / wire if formula is not None and wire > 0 else None
            scaled = outcome.scaled(own.elements, overheads[hook], sent)
            yield hook, replace(scaled, error=self._error(group, hook))

    def _error(self, group: int, hook: str) -> float:
        """Return the relative error of a hook on a group; infinity if the hook was never tried.

        Until it is measured there, the mean of other groups, and at least what it has lost on those
        where it was in use.
        """
        if hook in self.lossless:
            return 0.0
        lost = self._errors.get(hook, {})
        if group in lost:
            return lost[group]
        tried = {i: outcome.error for i, outcome in self._outcomes.get(hook, {}).items()}
        tried = {group: tried[group]} if group in tried else tried
        return max((fmean(each.values()) for each in (lost, tried) if each), default=math.inf)

    def _limit(self, agreed: AgreedState) -> float:
        """Return the limit: of a reference, its error on the whole model, also where it is exact.

        That of the plan in use while the reference was not tried.
        """
        reference, norms = self.limit, self._norms
        if not isinstance(reference, str):
            return reference
        if reference not in self._outcomes:
            return agreed.plan.limit
        squares = ((self._error(i, reference) * norm) ** 2 for i, norm in norms.items())
        return relative(squares, norms.values())

    # --------------------------------------------------------------------------- what is decided

    def _go_on(self, problem: Problem, agreed: AgreedState, step: int, period: int) -> AgreedState:
        """Plan a check whose report is about ``period`` steps later."""
        used = problem.assignment(agreed.plan.hook_of())
        metrics = {
            "plans": float(len(agreed.history)),
            "error": agreed.plan.error if used is None else problem.error_of(used),
            "limit": problem.error,
            "predicted_seconds": agreed.plan.after.step_seconds,
            "link_megabits_per_second": 8e-6 / max(self._link.byte_seconds, 1e-15),
            "link_round_microseconds": self._link.round_seconds * 1e6,
            "step_seconds": self._slowest.step_seconds,
        }
        agreed = self._check(agreed, step + max(period - _TIMED, 2), self._regular)
        return replace(agreed, metrics=metrics)

    def _change(
        self, problem: Problem, before: AgreedState, plan: Plan, step: int, reason: str
    ) -> AgreedState:
        hooks, plain = before.plan.hook_of(), problem.plain
        changes = sum(hooks.get(n, plain) != hook for n, hook in plan.hook_of().items())
        seconds = plan.after.step_seconds, self._link.byte_seconds
        decision = Decision(step, reason, changes, plan.error, plan.limit, *seconds)
        agreed = replace(before, plan=plan, history=(*before.history, decision))
        # Nothing is measured for a long time if it cannot pay.
        period = self._period(agreed, step) if self._outcomes else self.replan
        return self._go_on(problem, agreed, step, period)

    def _why_exact(self, problem: Problem, agreed: AgreedState) -> str:
        """Return why no hook can save enough, an empty text if one may."""
        sending = math.fsum(problem.costs(g, problem.plain)[1] for g in problem.groups)
        share = sending / self._slowest.step_seconds
        if share >= LEAST_SAVING or agreed.plan.error > 0:
            return ""
        return (
            f"Average exactly: a hook that sends nothing saves {share:.1%} of a step, and a plan "
            f"has to save {LEAST_SAVING:.0%}."
        )

    def _why_new(self, problem: Problem, agreed: AgreedState, since: int) -> str:
        """Return why to make a new plan ``since`` steps after the last one, or an empty text."""
        used, limit = problem.assignment(agreed.plan.hook_of()), problem.error
        error = math.inf if used is None else problem.error_of(used)
        if error > _BEYOND_LIMIT * limit:
            return f"the error of the plan is {error:.3g}, its limit {limit:.3g}"
        before, now = agreed.history[-1].byte_seconds, self._link.byte_seconds
        if abs(now - before) > _OTHER_RATE * before:
            rates = (8e-6 / max(each, 1e-15) for each in (before, now))
            return "the link changed from {:.4g} to {:.4g} Mbit/s".format(*rates)
        return self._regular if since >= self.replan else ""

    def _check(self, agreed: AgreedState, start: int, reason: str) -> AgreedState:
        """Time steps, probe the link, and compare what the lossy hooks in use return."""
        elements = probe_elements(self._link, self.model_bytes, self.size)
        return replace(agreed, start=start, reason=reason, trials={}, probe=elements)

    def _trials(self) -> dict[int, list[str]]:
        """Return the candidates for the largest groups, and for those of most norm the reference.

        Of groups that stay exact, only the reference is tried.
        """
        groups, hooks = self.groups, list(self.hooks)
        reference = [self.limit] if isinstance(self.limit, str) else []
        free = [i for i, group in enumerate(groups) if not group.is_exact and len(hooks) > 1]
        free = sorted(free, key=lambda i: -groups[i].elements)[:_MOST_TRIED]
        fixed = [i for i, group in enumerate(groups) if group.is_exact and free and reference]
        fixed = sorted(fixed, key=lambda i: -self._norms.get(i, 0.0))[: _MOST_TRIED // 2]
        every = [*hooks, *(hook for hook in reference if hook not in hooks)]
        return {i: every if i in free else reference for i in sorted([*free, *fixed])}

    def _period(self, agreed: AgreedState, step: int) -> int:
        """Return the steps until the next check, such that checks take 1 % of the time."""
        period = math.ceil(self._spent_seconds / (_SHARE * self._slowest.step_seconds))
        hooks = set(agreed.plan.hook_of().values())
        period = max(period, _NATIVE_CHECK if len(hooks) == 1 else _FIRST_CHECK)
        if agreed.plan.error > 0:  # which grows after a change
            changed = next((each.step for each in reversed(agreed.history) if each.changes), 0)
            period = min(period, max(step - changed, _FIRST_CHECK))
        return min(period, self.replan)
