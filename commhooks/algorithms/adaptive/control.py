"""What ``auto`` knows and decides. It has no hooks and moves no gradients.

::

    check   some steps are timed, and the link is probed    could a hook save enough? ─ no ─► exact
    try     each candidate on samples of some groups        solve() ─► a plan
    check   later, also the errors of the hooks in use      a reason for another plan? ─► try, solve

Each of these is an :class:`Agenda`, which ends with a report.

Note [One plan]
~~~~~~~~~~~~~~~
A plan that differs between ranks would hang or mix up numbers. So rank 0 decides, by what all ranks
have reported, and the others follow:

    step r      gather the reports         if the step fails, all ranks drop them, and repeat it
    step r+1    rank 0 decides; broadcast  of its instructions
    step r+2    follow the instructions    which all ranks have, because step r+1 has succeeded

If a step fails, even before it reaches this hook on some rank, all ranks repeat it under the same
number. So what was gathered under the number of the present step is of a failed one.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from commhooks.algorithms.adaptive.groups import Buckets
from commhooks.algorithms.adaptive.link import (
    ALL,
    Probe,
    backend_of,
    link_of,
    network_of,
    probe_bytes,
    tensor_bytes,
)
from commhooks.algorithms.adaptive.messages import Agenda, Decision, Instructions, Report
from commhooks.costs.step_trace import BucketTrace, Collective
from commhooks.planning import Choice, Group, Outcome, Plan, Problem, solve
from commhooks.planning.problem import exact, overheads_of, sending_seconds, squared_error
from commhooks.planning.solver import LEAST_SAVING, plan_of, without_contention

__all__ = ["Candidates", "Controller"]

_LOG = logging.getLogger("commhooks")
_TIMED = 3
"""Steps whose times are taken before a check."""
_TRIED = 8
"""Steps in which candidates are tried: their errors grow with what they have not sent."""
_FIRST_CHECK = 10
"""Steps after a new plan. Errors may grow for more steps than those of a trial: until checks are
far enough apart, each comes after twice as many steps as the one before it."""
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
class Candidates:
    """What there is to choose from."""

    specs: tuple[str, ...]
    """Of the hooks, the exact one first."""
    lossless: tuple[bool, ...]
    tried: tuple[int, ...]
    """The positions of the hooks that are tried."""
    limit: float | int
    """The limit of the error, or the position of the hook that is tried as a reference."""
    sent: Callable[[int, Sequence[str]], int | None] = lambda *_: None
    """Returns what a hook sends for some parameters, by its formula."""


class Controller:
    """Knows what ranks have reported, and decides on rank 0."""

    def __init__(self, candidates: Candidates, *, replan: int, backend: str, size: int) -> None:
        self.candidates = candidates
        self.plan: Plan | None = None
        self.history: list[Decision] = []
        self.groups: tuple[Group, ...] = ()
        self.agenda: Agenda | None = None
        self.link: Probe | None = None
        self._buckets: Buckets = ()
        self._replan = replan
        self._backend = backend
        self._size = size
        self._reason = ""
        self._forget()

    def _forget(self) -> None:
        self._times = Report()
        """Of the slowest rank."""
        self._timed_with: dict[str, str] | None = None
        """The hooks in use then."""
        self._norms: dict[int, float] = {}
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        """Of trials, by group and hook."""
        self._errors: dict[tuple[int, int], float] = {}
        """Of hooks in use, by group and hook: they count more than those of trials."""

    def use_buckets(self, buckets: Buckets, groups: Sequence[Group], step: int) -> None:
        """Measure from ``step`` on: the same buckets came twice."""
        self._buckets, self.groups = buckets, tuple(groups)
        self._forget()
        self._reason = "new buckets, or a resumed run" if self.history else "the first plan"
        self.agenda = self._check(step)

    def has_buckets(self, buckets: Buckets) -> bool:
        """Return whether these buckets are the present ones."""
        return [names for names, _ in buckets] == [names for names, _ in self._buckets]

    def groups_of(self, names: Iterable[str]) -> dict[int, Group]:
        """Return the groups of a bucket by their positions."""
        of_bucket = set(names)
        return {i: g for i, g in enumerate(self.groups) if of_bucket.issuperset(g.names)}

    def is_lossy(self, group: Group) -> bool:
        """Return whether the hook in use of a group has an error."""
        return not self.candidates.lossless[self._hook_in_use(group)]

    def hooks_to_try(self, group: int) -> Sequence[int]:
        """Return the hooks to try on a group; of groups that stay exact, only the reference."""
        if not self.groups[group].is_exact:
            return self.candidates.tried
        limit = self.candidates.limit
        return [limit] if isinstance(limit, int) else []

    # -------------------------------------------------------------------------------- agreement

    def take(self, reports: Sequence[Report]) -> None:
        """Learn from the reports of all ranks."""
        known = [report for report in reports if report.step_seconds > 0 and report.launches]
        if known:
            self._times = Report(
                cores=min(report.cores for report in reports),
                step_seconds=max(report.step_seconds for report in known),
                forward_seconds=max(report.forward_seconds for report in known),
                launches=list(map(max, zip(*(each.launches for each in known), strict=True))),
            )
            self._timed_with = self._hooks_in_use()
        self._times.spent_seconds = max(report.spent_seconds for report in reports)
        self.link = link_of([r.probe for r in reports if r.probe], self.link)
        self._norms |= _largest(pair for report in reports for pair in report.norms)
        for i, error in _largest(pair for report in reports for pair in report.errors).items():
            self._errors[i, self._hook_in_use(self.groups[i])] = error
        for same in zip(*(report.outcomes for report in reports), strict=False):
            if (outcome := _slowest(same)) is not None:
                self._outcomes[outcome.group, outcome.hook] = outcome

    def decide(self, step: int) -> Instructions:
        """Return what to do from the next step on, by what was reported."""
        assert self.agenda is not None
        problem, has_tried = self.problem(), bool(self.agenda.trials)
        if problem is None:  # gradients were not finite, or a rank has not seen the steps
            return Instructions(self._try(step + 1) if has_tried else self._check(step + 1))
        if not has_tried and self._outcomes:
            reason, since = self._why_new(step), step - self.history[-1].step
            if reason is None:
                period = min(self._period(self.plan), max(since, _FIRST_CHECK))
                return Instructions(self._later(step, min(period, self._replan - since)))
            self._reason = reason
            if since >= self._replan:
                return Instructions(self._try(step + 1))
        elif not has_tried and (trials := self._try(step + 1)).trials:
            if why := self._why_exact(problem):
                return self._with_plan(plan_of(problem, exact(problem), why), step)
            return Instructions(trials)
        return self._with_plan(solve(problem, self._hooks_in_use()), step)

    def follow(self, instructions: Instructions) -> bool:
        """Follow what rank 0 has decided, and return whether there is a new plan."""
        self.agenda = instructions.agenda
        if instructions.decision is not None:
            self.history.append(instructions.decision)
            _LOG.info("auto, step %d: %s", instructions.decision.step, instructions.decision)
        if instructions.plan is None:
            return False
        self.plan = instructions.plan
        return True

    def _with_plan(self, plan: Plan, step: int) -> Instructions:
        assert self.link is not None
        before, unchanged = self._hooks_in_use() or {}, self.candidates.specs[0]
        changes = sum(before.get(n, unchanged) != hook for n, hook in plan.hook_of().items())
        reason, self._reason = self._reason, f"{self._replan} steps since the last plan"
        seconds = plan.after.step_seconds, self.link.byte_seconds
        decision = Decision(step, reason, changes, plan.error, plan.limit, *seconds)
        if not self._outcomes:  # it cannot pay, so nothing is measured for a long time
            period = self._replan
        else:
            period = _FIRST_CHECK if changes and plan.error > 0 else self._period(plan)
        return Instructions(self._later(step, period), plan, decision)

    # --------------------------------------------------------------------------------- agendas

    def _check(self, start: int) -> Agenda:
        """Time steps, probe the link, and compare what the hooks in use return."""
        return Agenda(start, start + _TIMED + 1, probe=self._probe_elements())

    def _later(self, step: int, period: int) -> Agenda:
        """Check such that the report is about ``period`` steps later."""
        return self._check(step + max(period - _TIMED, 2))

    def _try(self, step: int) -> Agenda:
        """Try the candidates on the largest groups, and the reference on those of most norm."""
        groups = self.groups
        by_size = sorted(range(len(groups)), key=lambda i: -groups[i].elements)
        by_norm = sorted(range(len(groups)), key=lambda i: -self._norms.get(i, 0.0))
        has_choice = any(hook > 0 for hook in self.candidates.tried)
        chosen = [i for i in by_size if has_choice and not groups[i].is_exact]
        # The last few percent of the parameters are not worth a trial.
        covered = sum(groups[i].elements for i in chosen)
        while len(chosen) > 1 and groups[chosen[-1]].elements < covered / 50:
            chosen.pop()
        chosen = chosen[:_MOST_TRIED]
        if chosen:
            exact_ones = [i for i in by_norm if groups[i].is_exact and self.hooks_to_try(i)]
            chosen += exact_ones[: _MOST_TRIED // 2]
        return Agenda(step, step + (_TRIED if chosen else 0), trials=sorted(chosen))

    def _period(self, plan: Plan | None) -> int:
        """Return the steps until the next check, such that checks take 1 % of the time."""
        pace = self._times.spent_seconds / (_SHARE * self._times.step_seconds)
        least = _FIRST_CHECK
        if plan is not None and len(set(plan.hook_of().values())) == 1:
            least = _NATIVE_CHECK
        return min(max(math.ceil(pace), least), self._replan)

    def _probe_elements(self) -> int:
        nbytes = probe_bytes(self.link, sum(nbytes for _, nbytes in self._buckets))
        return math.ceil(tensor_bytes("all_reduce", nbytes, self._size) / 4)

    # ------------------------------------------------------------------------------- decisions

    def _why_exact(self, problem: Problem) -> str:
        """Return why no hook can save enough, an empty text if one may."""
        if self.plan is not None and self.plan.error > 0:
            return ""
        sending = math.fsum(sending_seconds(problem, group.exact) for group in problem.groups)
        share = sending / self._times.step_seconds
        if share >= LEAST_SAVING:
            return ""
        return (
            f"Average exactly: a hook that sends nothing saves {share:.1%} of a step, and a plan "
            f"has to save {LEAST_SAVING:.0%}."
        )

    def _why_new(self, step: int) -> str | None:
        """Return why to make a new plan, or None."""
        assert self.plan is not None
        assert self.link is not None
        limit = self._limit()
        error = self._error_of(self.plan)
        if error > _BEYOND_LIMIT * limit:
            return f"the error of the plan is {error:.3g}, its limit {limit:.3g}"
        last, byte_seconds = self.history[-1], self.history[-1].byte_seconds
        if abs(self.link.byte_seconds - byte_seconds) > _OTHER_RATE * byte_seconds:
            rates = (8e-6 / max(each, 1e-15) for each in (byte_seconds, self.link.byte_seconds))
            return "the link changed from {:.4g} to {:.4g} Mbit/s".format(*rates)
        if step - last.step >= self._replan:
            return f"{self._replan} steps since the last plan"
        return None

    def problem(self) -> Problem | None:
        """Return what a plan would be made for now; None if not enough is known."""
        link, times, norms = self.link, self._times, self._norms
        if not self.groups or link is None or not times.step_seconds > 0:
            return None
        if any(not math.isfinite(norms.get(i, math.nan)) for i in range(len(self.groups))):
            return None
        if self.agenda is not None and self.agenda.trials and not self._outcomes:
            return None
        overheads = overheads_of([*self._outcomes.values()], len(self.candidates.specs))
        problem = Problem(
            hooks=self.candidates.specs,
            overheads=overheads,
            groups=tuple(
                replace(group, norm=norms[i], choices=tuple(self._choices(i, overheads)))
                for i, group in enumerate(self.groups)
            ),
            buckets=tuple(
                BucketTrace(nbytes, seconds, 0.0)
                for seconds, (_, nbytes) in zip(times.launches, self._buckets, strict=True)
            ),
            forward_seconds=times.forward_seconds,
            network=network_of(link, self._size),
            backend=backend_of(self._backend, link.byte_cpu_seconds),
            cores=times.cores,
            error=self._limit(),
        )
        return without_contention(problem, self._timed_with)

    def _choices(self, group: int, overheads: Sequence[float]) -> Iterator[Choice]:
        own = self.groups[group]
        for hook, overhead in enumerate(overheads[:1] if own.is_exact else overheads):
            outcome = self._outcome(group, hook)
            if outcome is not None:
                factor = None
                formula = self.candidates.sent(hook, own.names)
                wire = math.fsum(each.wire_bytes(self._size) for each in outcome.collectives)
                if formula is not None and wire > 0:  # rows do not show a low rank's bytes
                    factor = formula / wire
                yield outcome.choice(own.elements, overhead, self._error(group, hook), factor)
            elif hook == 0:
                elements = sum(g.elements for g in self.groups if g.bucket == own.bucket)
                nbytes = self._buckets[own.bucket][1] * own.elements / max(elements, 1)
                yield Choice(0, (0.0, 0.0), (Collective("all_reduce", nbytes, ALL),), 0.0)

    def _outcome(self, group: int, hook: int) -> Outcome | None:
        """Return the trial of the hook on this group, else that on the largest sample."""
        found = [outcome for (_, i), outcome in self._outcomes.items() if i == hook]
        largest = max(found, key=lambda outcome: outcome.elements, default=None)
        return self._outcomes.get((group, hook), largest)

    def _error(self, group: int, hook: int) -> float:
        """Return the relative error of a hook on a group; infinity if the hook was never tried.

        Until it is measured there, the mean of other groups, and at least what it has lost on those
        where it was in use.
        """
        if self.candidates.lossless[hook]:
            return 0.0
        if (group, hook) in self._errors:
            return self._errors[group, hook]
        lost = [error for (_, i), error in self._errors.items() if i == hook]
        tried = [outcome.error for (_, i), outcome in self._outcomes.items() if i == hook]
        if (own := self._outcomes.get((group, hook))) is not None:
            tried = [own.error]
        return max((fmean(each) for each in (lost, tried) if each), default=math.inf)

    def _error_of(self, plan: Plan) -> float:
        """Return the error of a plan by what is known now."""
        hook_of, specs = plan.hook_of(), self.candidates.specs
        hooks = [specs.index(hook_of.get(group.names[0], specs[0])) for group in self.groups]
        errors = [self._error(i, hook) for i, hook in enumerate(hooks)]
        return self._relative(
            squared_error(error, self._norms[i])
            for i, error in enumerate(errors)
            if error < math.inf or self._outcomes
        )

    def _limit(self) -> float:
        """Return the limit: of a reference, its error on the whole model, also where it is exact.

        If all groups are, nothing is tried, and nothing may have an error.
        """
        reference = self.candidates.limit
        if not isinstance(reference, int):
            return float(reference)
        is_known = any(hook == reference for _, hook in self._outcomes)
        if all(group.is_exact for group in self.groups) or not is_known:
            return self.plan.limit if self.plan is not None else 0.0
        errors = [self._error(i, reference) for i in range(len(self.groups))]
        return self._relative((error * self._norms[i]) ** 2 for i, error in enumerate(errors))

    def _relative(self, squares: Iterable[float]) -> float:
        right = math.fsum(norm**2 for norm in self._norms.values())
        return math.sqrt(math.fsum(squares) / right) if right else 0.0

    def _hooks_in_use(self) -> dict[str, str] | None:
        """Return the hook of each parameter, None before the first plan."""
        return None if self.plan is None else self.plan.hook_of()

    def _hook_in_use(self, group: Group) -> int:
        hook_of = self._hooks_in_use() or {}
        return self.candidates.specs.index(hook_of.get(group.names[0], self.candidates.specs[0]))

    # -------------------------------------------------------------------------- state and metrics

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers about the plan in use, as last checked, and the link. The same on all ranks."""
        found: dict[str, float] = {}
        if (link := self.link) is not None:
            found["link_megabits_per_second"] = 8e-6 / max(link.byte_seconds, 1e-15)
            found["link_round_microseconds"] = link.round_seconds * 1e6
        if (plan := self.plan) is not None:
            known = bool(self._norms)
            found["error"] = self._error_of(plan) if known else plan.error
            found["limit"] = self._limit() if known else plan.limit
            found["predicted_seconds"] = plan.after.step_seconds
        if self._times.step_seconds > 0:
            found["step_seconds"] = self._times.step_seconds
        return found

    def to_json(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, in JSON's types."""
        return {
            "plan": self.plan and self.plan.to_json(),
            "history": [vars(decision) for decision in self.history],
            "link": self.link and vars(self.link),
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Take over what :meth:`to_json` returned. Measuring begins again with the next buckets."""
        self.plan = data["plan"] and Plan.from_json(data["plan"])
        self.history = [Decision(**decision) for decision in data["history"]]
        self.link = data["link"] and Probe(**data["link"])
        self._buckets, self.groups, self.agenda = (), (), None


def _largest(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the largest finite number of each position."""
    found: dict[int, float] = {}
    for i, value in pairs:
        if math.isfinite(value):
            found[i] = max(value, found.get(i, 0.0))
    return found


def _slowest(of_ranks: Sequence[Outcome]) -> Outcome | None:
    """Return an outcome with the longest times; None if ranks differ or it is not finite."""
    alike = {(o.group, o.hook, tuple(c.operation for c in o.collectives)) for o in of_ranks}
    if len(alike) > 1 or not all(math.isfinite(outcome.error) for outcome in of_ranks):
        return None
    return replace(
        of_ranks[0],
        error=max(outcome.error for outcome in of_ranks),
        local_seconds=tuple(map(max, zip(*(o.local_seconds for o in of_ranks), strict=True))),
        collectives=tuple(
            replace(same[0], tensor_bytes=max(each.tensor_bytes for each in same))
            for same in zip(*(outcome.collectives for outcome in of_ranks), strict=True)
        ),
    )
