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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from commhooks.algorithms.adaptive.groups import Layout, ParameterGroup
from commhooks.algorithms.adaptive.messages import (
    Agenda,
    Decision,
    Instructions,
    Probe,
    Report,
    TrialRecord,
)
from commhooks.costs.backends import NCCL, Backend, Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.step_trace import BucketTrace, Collective, Members
from commhooks.planning import Choice, Group, Plan, Problem, solve
from commhooks.planning.problem import exact, sending_seconds, squared_error
from commhooks.planning.solver import LEAST_SAVING, plan_of, without_contention

__all__ = ["Candidates", "Controller", "backend_of", "link_of", "network_of", "tensor_bytes"]

_LOG = logging.getLogger("commhooks")
_TIMED = 3
"""Steps whose times are taken before a check."""
_FIRST_CHECK = 10
"""Steps after a new plan. Trials have no residual, so errors grow for some steps: until checks are
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
_LONG_BYTES, _MOST_BYTES, _LONG_SECONDS = 1 << 20, 1 << 24, 10e-3
"""A message of a probe has at least these bytes and takes this long: links have buffers, so that
after a pause some bytes pass faster than the rate, and small messages wait for late threads."""
_FIRST_SHARE = 1 / 8
"""Of the model, in each message of the first probe."""
_UNLIMITED = 1e15
_ALL = Members(1, spans_nodes=True)


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from. ``specs``: of the hooks, the exact one first."""

    specs: tuple[str, ...]
    lossless: tuple[bool, ...]
    tried: tuple[int, ...]
    """The positions of the hooks that are tried: all but the exact one."""
    limit: float | int
    """The limit of the error, or the position of the hook that is tried as a reference."""


class Controller:
    """Knows what ranks have reported, and decides on rank 0."""

    def __init__(self, candidates: Candidates, *, replan: int, backend: str, size: int) -> None:
        self.candidates = candidates
        self.plan: Plan | None = None
        self.history: list[Decision] = []
        self.layout: Layout | None = None
        self.agenda: Agenda | None = None
        self._replan = replan
        self._backend = backend
        self._size = size
        self._reason = ""
        self.link: Probe | None = None
        self._forget()

    def _forget(self) -> None:
        self._times = Report()
        """Of the slowest rank."""
        self._timed_with: dict[str, str] | None = None
        """The hooks in use then."""
        self._norms: dict[int, float] = {}
        self._trials: dict[tuple[int, int], TrialRecord] = {}
        self._errors: dict[tuple[int, int], float] = {}
        """Of hooks in use, by group and hook: they count more than those of trials."""
        self._runs: dict[int, tuple[int, float]] = {}

    def use_layout(self, layout: Layout, step: int) -> None:
        """Measure from ``step`` on: the same buckets came twice."""
        self.layout = layout
        self._forget()
        self._reason = "new buckets, or a resumed run" if self.history else "the first plan"
        self.agenda = self._check(step)

    def has_buckets(self, buckets: Sequence[tuple[tuple[str, ...], int]]) -> bool:
        """Return whether these buckets are those of the present layout."""
        layout = self.layout
        return layout is not None and layout.buckets == tuple(names for names, _ in buckets)

    def groups_of(self, names: Iterable[str]) -> Iterator[tuple[int, ParameterGroup]]:
        """Yield the groups of a bucket with their positions."""
        of_bucket = set(names)
        for i, group in enumerate(self.layout.groups if self.layout else ()):
            if of_bucket.issuperset(group.names):
                yield i, group

    def is_lossy(self, group: ParameterGroup) -> bool:
        """Return whether the hook in use of a group has an error."""
        return not self.candidates.lossless[self._hook_in_use(group)]

    def hooks_to_try(self, group: int) -> Sequence[int]:
        """Return the hooks to try on a group; of groups that stay exact, only the reference."""
        assert self.layout is not None
        if not self.layout.groups[group].is_exact:
            return self.candidates.tried
        limit = self.candidates.limit
        return [limit] if isinstance(limit, int) else []

    def is_known(self, hook: int) -> bool:
        """Return whether there was a trial of this hook."""
        return any(i == hook for _, i in self._trials)

    # -------------------------------------------------------------------------------- agreement

    def take(self, reports: Sequence[Report]) -> None:
        """Learn from the reports of all ranks."""
        assert self.layout is not None
        launches = [report.launches for report in reports if report.launches]
        known = [r for r in reports if r.step_seconds > 0]
        spent = max(report.spent_seconds for report in reports)
        if known and launches:
            self._times = Report(
                cores=min(report.cores for report in reports),
                step_seconds=max(report.step_seconds for report in known),
                forward_seconds=max(report.forward_seconds for report in known),
                launches=[max(column) for column in zip(*launches, strict=True)],
            )
            self._timed_with = self._hooks_in_use()
        self._times.spent_seconds = spent
        self.link = link_of([r.probe for r in reports if r.probe], self.link)
        for group, norm in _largest((i, norm) for r in reports for i, norm in r.norms).items():
            self._norms[group] = norm
        for group, error in _largest((i, error) for r in reports for i, error in r.errors).items():
            hook = self._hook_in_use(self.layout.groups[group])
            self._errors[group, hook] = error
        for same in zip(*(report.trials for report in reports), strict=False):
            if (trial := _slowest_trial(same)) is not None:
                self._trials[trial.group, trial.hook] = trial
        runs = sorted(run for report in reports for run in report.runs)
        self._runs |= {hook: (elements, seconds) for hook, elements, seconds in runs}  # the slowest

    def decide(self, step: int) -> Instructions:
        """Return what to do from the next step on, by what was reported."""
        assert self.agenda is not None
        problem, has_tried = self.problem(), bool(self.agenda.trials)
        if problem is None:  # gradients were not finite, or a rank has not seen the steps
            return Instructions(self._try(step + 1) if has_tried else self._check(step + 1))
        if not has_tried and self._trials:
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
        decision = Decision(
            step,
            reason,
            changes,
            plan.error,
            plan.limit,
            plan.after.step_seconds,
            self.link.byte_seconds,
        )
        if not self._trials:  # it cannot pay, so nothing is measured for a long time
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
        assert self.layout is not None
        groups = self.layout.groups
        by_size = sorted(range(len(groups)), key=lambda i: -groups[i].elements)
        by_norm = sorted(range(len(groups)), key=lambda i: -self._norms.get(i, 0.0))
        chosen = [i for i in by_size if not groups[i].is_exact and self.hooks_to_try(i)]
        # The last few percent of the parameters are not worth a trial.
        covered = sum(groups[i].elements for i in chosen)
        while len(chosen) > 1 and groups[chosen[-1]].elements < covered / 50:
            chosen.pop()
        chosen = chosen[:_MOST_TRIED]
        if chosen:
            exact_ones = [i for i in by_norm if groups[i].is_exact and self.hooks_to_try(i)]
            chosen += exact_ones[: _MOST_TRIED // 2]
        return Agenda(step, step + len(chosen), trials=chosen)

    def _period(self, plan: Plan | None) -> int:
        """Return the steps until the next check, such that checks take 1 % of the time."""
        pace = self._times.spent_seconds / (_SHARE * self._times.step_seconds)
        least = _FIRST_CHECK
        if plan is not None and len(set(plan.hook_of().values())) == 1:
            least = _NATIVE_CHECK
        return min(max(math.ceil(pace), least), self._replan)

    def _probe_elements(self) -> int:
        assert self.layout is not None
        nbytes = sum(self.layout.bucket_bytes) * _FIRST_SHARE
        if self.link is not None:
            nbytes = _LONG_SECONDS / max(self.link.byte_seconds, 1e-15)
        nbytes = min(max(nbytes, _LONG_BYTES), _MOST_BYTES)
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
        layout, link, times = self.layout, self.link, self._times
        if layout is None or link is None or not times.step_seconds > 0:
            return None
        if any(not math.isfinite(self._norms.get(i, math.nan)) for i in range(len(layout.groups))):
            return None
        if self.agenda is not None and self.agenda.trials and not self._trials:
            return None
        costs = [self._local_cost(i) for i in range(len(self.candidates.specs))]
        problem = Problem(
            hooks=self.candidates.specs,
            overheads=tuple(overhead for overhead, _ in costs),
            groups=tuple(
                Group(
                    group.names,
                    group.bucket,
                    group.label,
                    group.elements,
                    self._norms[i],
                    tuple(self._choices(i, [per_element for _, per_element in costs])),
                )
                for i, group in enumerate(layout.groups)
            ),
            buckets=tuple(
                BucketTrace(nbytes, seconds, 0.0)
                for seconds, nbytes in zip(times.launches, layout.bucket_bytes, strict=True)
            ),
            forward_seconds=times.forward_seconds,
            network=network_of(link.round_seconds, link.byte_seconds, self._size),
            backend=backend_of(self._backend, link.byte_cpu_seconds),
            cores=times.cores,
            error=self._limit(),
        )
        return without_contention(problem, self._timed_with)

    def _choices(self, group: int, per_element: Sequence[float]) -> Iterator[Choice]:
        assert self.layout is not None
        own = self.layout.groups[group]
        sent = own.elements * self.layout.itemsize(own.bucket)
        plain = Collective("all_reduce", sent, _ALL)
        yield Choice(0, (per_element[0] * own.elements, 0.0), (plain,), 0.0)
        for hook in () if own.is_exact else range(1, len(self.candidates.specs)):
            trial = self._nearest(group, hook)
            if trial is None:
                continue
            wire = math.fsum(nbytes for *_, nbytes in trial.stages)
            if hook in own.wire_bytes and wire > 0:  # rows do not show a low rank's bytes
                factor = own.wire_bytes[hook] / wire
            else:
                factor = own.elements / max(trial.elements, 1)
            seconds = per_element[hook] * own.elements
            total = math.fsum(trial.local_seconds) or 1.0
            yield Choice(
                hook,
                tuple(seconds * local / total for local in trial.local_seconds),
                tuple(
                    Collective(name, tensor_bytes(name, nbytes, self._size) * factor, _ALL)
                    for _, name, nbytes in trial.stages
                ),
                self._error(group, hook),
            )

    def _nearest(self, group: int, hook: int) -> TrialRecord | None:
        """Return the trial of the hook on this group, else on the largest sample."""
        found = [t for (_, i), t in self._trials.items() if i == hook]
        own = self._trials.get((group, hook))
        return own or max(found, key=lambda trial: trial.elements, default=None)

    def _local_cost(self, hook: int) -> tuple[float, float]:
        """Return the local seconds of a run of a hook, and per element.

        By the least and the most elements. If there are not twice as many, which does not tell the
        costs apart, half of the time counts for each.
        """
        points = sorted(
            (t.elements, t.exact_seconds if hook == 0 else math.fsum(t.local_seconds))
            for (_, i), t in self._trials.items()
            if hook in (0, i)
        )
        points += [self._runs[hook]] if hook in self._runs else []
        if not points:
            return 0.0, 0.0
        (least, shortest), (most, longest) = min(points), max(points)
        if most >= 2 * least and longest > shortest:
            per_element = (longest - shortest) / (most - least)
            if (overhead := shortest - per_element * least) >= 0:
                return overhead, per_element
            return 0.0, longest / most
        seconds = median(seconds for _, seconds in points)
        return seconds / 2, seconds / 2 / max(median(elements for elements, _ in points), 1)

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
        own = self._trials.get((group, hook))
        tried = [own] if own else [t for (_, i), t in self._trials.items() if i == hook]
        means = [fmean(each) for each in (lost, [t.error for t in tried]) if each]
        return max(means, default=math.inf)

    def _error_of(self, plan: Plan) -> float:
        """Return the error of a plan by what is known now."""
        assert self.layout is not None
        hook_of, wrong = plan.hook_of(), 0.0
        for i, group in enumerate(self.layout.groups):
            spec = hook_of.get(group.names[0], self.candidates.specs[0])
            hook = self.candidates.specs.index(spec)
            if (i, hook) in self._errors or self._trials:
                wrong += squared_error(self._error(i, hook), self._norms[i])
        right = math.fsum(norm**2 for norm in self._norms.values())
        return math.sqrt(wrong / right) if right else 0.0

    def _limit(self) -> float:
        """Return the limit: of a reference, its error on the whole model, also where it is exact.

        If all groups are, nothing is tried, and nothing may have an error.
        """
        assert self.layout is not None
        reference, groups = self.candidates.limit, self.layout.groups
        if not isinstance(reference, int):
            return float(reference)
        if all(group.is_exact for group in groups) or not self.is_known(reference):
            return self.plan.limit if self.plan is not None else 0.0
        wrong = math.fsum(
            (self._error(i, reference) * self._norms[i]) ** 2 for i in range(len(groups))
        )
        right = math.fsum(norm**2 for norm in self._norms.values())
        return math.sqrt(wrong / right) if right else 0.0

    def _hooks_in_use(self) -> dict[str, str] | None:
        """Return the hook of each parameter, None before the first plan."""
        return None if self.plan is None else self.plan.hook_of()

    def _hook_in_use(self, group: ParameterGroup) -> int:
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
        self.layout = self.agenda = None


def link_of(probes: Sequence[Probe], before: Probe | None) -> Probe | None:
    """Return what the probes of all ranks say together.

    The mean rate counts, because a rank that begins late finds bytes that its peer has sent before.
    Late threads make rounds seem longer, and other work of the process makes the time of cores seem
    longer, so the least counts, also of earlier probes.
    """
    if not probes:
        return before
    every = [*probes, before] if before else probes
    return Probe(
        min(probe.round_seconds for probe in every),
        fmean(probe.byte_seconds for probe in probes),
        min(probe.byte_cpu_seconds for probe in every),
    )


def backend_of(name: str, byte_cpu_seconds: float = 0.0) -> Backend:
    """Return the costs of a backend. Those of a round are the network's."""
    return NCCL() if name == "nccl" else Gloo(0.0, 0.0, byte_cpu_seconds)


def network_of(round_seconds: float, byte_seconds: float, size: int) -> Network:
    """Return ``size`` nodes of one rank each, with these costs of a round and of a byte."""
    rate = min(8 / byte_seconds, _UNLIMITED) if byte_seconds > 0 else _UNLIMITED
    return Network(size, Link(rate, round_seconds, payload_share=1.0), Link(_UNLIMITED))


def tensor_bytes(operation: str, wire_bytes: float, size: int) -> float:
    """Return the size of the tensor of a collective by which a rank sends ``wire_bytes``."""
    whole = 1 << 20
    per_byte = Collective(operation, whole, _ALL).wire_bytes(size) / whole
    return wire_bytes / per_byte if per_byte else 0.0


def _largest(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the largest finite number of each position."""
    found: dict[int, float] = {}
    for i, value in pairs:
        if math.isfinite(value):
            found[i] = max(value, found.get(i, 0.0))
    return found


def _slowest_trial(of_ranks: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return a trial with the longest times; None if ranks differ or gradients are not finite."""
    first = of_ranks[0]
    keys = {(t.group, t.hook, tuple(name for _, name, _ in t.stages)) for t in of_ranks}
    if len(keys) > 1 or not all(math.isfinite(trial.error) for trial in of_ranks):
        return None
    stages = [
        (max(seconds for seconds, *_ in same), same[0][1], max(nbytes for *_, nbytes in same))
        for same in zip(*(trial.stages for trial in of_ranks), strict=True)
    ]
    return replace(
        first,
        error=max(trial.error for trial in of_ranks),
        stages=stages,
        last_seconds=max(trial.last_seconds for trial in of_ranks),
        exact_seconds=max(trial.exact_seconds for trial in of_ranks),
    )
