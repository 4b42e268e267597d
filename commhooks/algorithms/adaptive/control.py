"""The part of ``auto`` that measures, agrees and plans. It has no hooks and moves no gradients."""

import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from commhooks.algorithms.adaptive.decision import Basis, Decision
from commhooks.algorithms.adaptive.fit import Cost
from commhooks.algorithms.adaptive.groups import Layout, ParameterGroup
from commhooks.algorithms.adaptive.knowledge import Knowledge
from commhooks.algorithms.adaptive.link import LinkTimes, backend_of, tensor_bytes
from commhooks.algorithms.adaptive.link_watch import LinkWatch
from commhooks.algorithms.adaptive.report import Agreed, Window, combine
from commhooks.algorithms.adaptive.schedule import Schedule
from commhooks.algorithms.adaptive.situation import Situation
from commhooks.errors import CommHookMismatchError
from commhooks.planning import Plan, Problem
from commhooks.planning.solver import solve

__all__ = ["Candidates", "Controller"]

_LOG = logging.getLogger("commhooks")
_DIGITS = 12
"""Of a plan's digest: as many as a float64 has room for."""
_BEYOND_LIMIT = 1.5
_NORMS = 3
"""Reports whose norms count: their median."""
_TRIALS = 8
"""Reports whose trials count for their pace: some groups and hooks take ten times as long."""
_PLANNING_SHARE = 0.005
"""Of the time of training, for plans and probes after the first ones."""
_FIRST_PROBE_SHARE, _FIRST_PROBE_BYTES = 1 / 8, 1 << 24
"""Of the model, and at most, in each message of the first probe."""


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from. ``specs``: of the hooks, the exact one first."""

    specs: tuple[str, ...]
    lossless: tuple[bool, ...]
    tried: tuple[int, ...]
    """The positions of the hooks that are tried: all but the exact one."""
    limit: float | int
    """The limit of the error, or the position of the hook that is tried as a reference."""

    @property
    def reference(self) -> int | None:
        return self.limit if isinstance(self.limit, int) else None


class Controller:
    """Decides which step measures what, and which plan the next step has.

    All of its decisions follow from the numbers of steps and from what all ranks have reported:
    they are the same on all ranks. Only ``window`` is this rank's own.
    """

    def __init__(self, candidates: Candidates, *, replan: int, backend: str, size: int) -> None:
        self._arguments = {"replan": replan, "backend": backend, "size": size}
        self.candidates = candidates
        self.plan: Plan | None = None
        self.proposal: Plan | None = None
        """The next plan. Not in use until all ranks are known to have it."""
        self.awaits_confirmation = False
        """Whether ranks are to compare digests in this step."""
        self.history: list[Decision] = []
        self.layout: Layout | None = None
        self.schedule: Schedule | None = None
        self._size = size
        self._replan = replan
        self._backend = backend
        own = backend_of(backend)
        self.window = Window(LinkTimes(own, size), LinkTimes(own, size))
        self.knowledge = Knowledge(len(candidates.lossless))
        self._window_start = 0
        self._basis: Basis | None = None
        self._agreed: Agreed | None = None
        self._link = LinkWatch()
        self._probe_step = -1
        self._probe_seconds = 0.0
        """What all probes after the first plan have taken."""
        self._norms: dict[str, list[float]] = {}
        self._trials = 0
        """Trials finished on all ranks."""
        self._trial_seconds = deque[float](maxlen=_TRIALS)
        self._planning_seconds = math.nan
        self._plans = 0
        self._origin = 0

    def new(self) -> "Controller":
        """Return one that knows nothing yet."""
        return Controller(self.candidates, **self._arguments)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------- what a step does

    def use_layout(self, layout: Layout, step: int) -> None:
        """Measure from ``step`` on: the same buckets came twice."""
        if self.layout is not None and layout == self.layout:
            return
        self._origin = self._origin if self.layout else step
        self.layout = layout
        before = self.schedule.trials_before if self.schedule else 0
        self.schedule = Schedule(step, len(self._unknown()), before)
        self._window_start = step
        self.window.clear()

    def has_buckets(self, buckets: Sequence[tuple[tuple[str, ...], int]]) -> bool:
        """Return whether these buckets are those of the present layout."""
        layout = self.layout
        return layout is not None and layout.buckets == tuple(names for names, _ in buckets)

    def groups_of(self, names: Sequence[str]) -> Iterator[tuple[int, ParameterGroup]]:
        """Yield the groups of a bucket with their positions."""
        of_bucket = set(names)
        for i, group in enumerate(self.layout.groups if self.layout else ()):
            if of_bucket.issuperset(group.names):
                yield i, group

    def is_lossy(self, group: ParameterGroup) -> bool:
        """Return whether the hook in use of a group has an error."""
        return not self.candidates.lossless[self._hook_in_use(group)]

    def trials(self, step: int) -> list[tuple[ParameterGroup, int, int]]:
        """Return the group and the hook of each trial in this step, and its number.

        The group is the same in all of them.
        """
        numbers = self.schedule.trials(step) if self.schedule else ()
        chosen = [(self._choose(number, step), number) for number in numbers]
        return [(*pair, number) for pair, number in chosen if pair is not None]

    def are_first_trials(self, step: int) -> bool:
        """Return whether the hooks that are tried in this step were never tried before."""
        return self.schedule is not None and self.schedule.is_burst(step)

    def probe_elements(self, step: int) -> int:
        """Return the elements of each message of the probe in this step, 0 if there is none."""
        nbytes = self._link.probe_bytes()
        if not nbytes and self.layout and self.schedule and self.schedule.probes(step):
            nbytes = min(sum(self.layout.bucket_bytes) * _FIRST_PROBE_SHARE, _FIRST_PROBE_BYTES)
        elif step != self._probe_step:
            return 0
        return math.ceil(tensor_bytes("all_reduce", nbytes, self._size) / 4)

    def reports(self, step: int) -> bool:
        """Return whether ranks report at the beginning of this step."""
        return self.schedule is not None and self.schedule.reports(step)

    def encode(self, step: int, cores: float) -> list[float]:
        """Return this rank's report, and forget what is in it. ``cores``: of this rank."""
        assert self.layout is not None
        numbers = self.window.encode(
            digest=self.digest,
            cores=cores,
            planning_seconds=self._planning_seconds,
            buckets=len(self.layout.buckets),
            groups=len(self.layout.groups),
            hooks=len(self.candidates.specs),
            trials=[number for *_, number in self._trials_until(step)],
        )
        self.window.clear()
        return numbers

    def recover(self) -> None:
        """Forget times, because a step has failed on some rank. Its trials are repeated with it."""
        self.window.clear_times()

    # ---------------------------------------------------------------------------------- agreement

    def take(self, rows: Sequence[Sequence[float]], reported: int, step: int) -> None:
        """Take the reports of all ranks, of step ``reported``. There may be a proposal then.

        Raises CommHookMismatchError on all ranks if they have different plans.
        """
        assert self.layout is not None
        assert self.schedule is not None
        tried = self._trials_until(reported)  # before knowledge changes
        agreed = combine(
            rows,
            buckets=len(self.layout.buckets),
            groups=len(self.layout.groups),
            hooks=len(self.candidates.specs),
            trials=len(tried),
        )
        _check_equal(agreed.digests)
        for (group, hook, _), trial in zip(tried, agreed.trials, strict=True):
            if trial is not None:
                self.knowledge.add(group, hook, trial)
                self._trials += 1
        for hook, (elements, seconds) in enumerate(agreed.runs):
            if elements > 0:
                self.knowledge.add_run(hook, elements, seconds)
        found = zip(self.layout.groups, agreed.norms, agreed.errors, strict=True)
        for group, norm, error in found:
            if math.isfinite(norm):
                self._add_norm(group, norm)
            if math.isfinite(error):
                self.knowledge.add_check(group, self._hook_in_use(group), error)
        self._agreed = agreed
        self._link.take(agreed, step, most_steps=self._replan)
        if self.plan is not None and agreed.probe_seconds > 0:
            self._probe_seconds += agreed.probe_seconds
        self._window_start = step
        if agreed.trial_seconds >= 0:
            self._trial_seconds.append(agreed.trial_seconds)
        self.schedule = self.schedule.paced(
            step,
            step_seconds=agreed.step_seconds,
            trial_seconds=fmean(self._trial_seconds or [math.nan]),
            report_seconds=agreed.report_seconds,
        )
        unknown = self._unknown()
        if unknown and len(unknown) == len(self.candidates.tried):  # gradients were not finite
            self.schedule = replace(self.schedule, burst=len(unknown))
        else:
            self._reconsider(step)
        self._plan_probe(step)
        self.awaits_confirmation = True

    def confirm(self, digests: Sequence[int]) -> bool:
        """Use the proposal, if there is one, and return whether: all ranks have the same.

        Raises CommHookMismatchError on all ranks if they have not.
        """
        _check_equal(digests)
        self.awaits_confirmation = False
        if self.proposal is None:
            return False
        self.plan, self.proposal = self.proposal, None
        self._link.expect_others()
        return True

    @property
    def digest(self) -> int:
        """Of the proposal or the plan in use, and of the schedule."""
        plan = self.proposal or self.plan
        text = f"{plan and plan.digest()} {self.schedule} {self._probe_step}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:_DIGITS], 16)

    def _reconsider(self, step: int) -> None:
        """Propose a new plan if there is a reason to make one."""
        situation = self._situation()
        reason = situation and self._reason(situation, step)
        if situation is None or not reason:
            return
        start = time.monotonic()
        in_use = self._hooks_in_use()
        plan = solve(situation.problem(in_use), in_use)
        self._planning_seconds = time.monotonic() - start
        self._plans += self.plan is not None
        self._basis = Basis(
            step,
            situation.link,
            _total(situation.norms),
            situation.limit,
            plan.error,
            self._trials,
        )
        before = in_use or {}
        exact = self.candidates.specs[0]
        changed = [n for n, hook in plan.hook_of().items() if before.get(n, exact) != hook]
        self.proposal = plan
        if changed and self.schedule is not None:
            self.schedule = self.schedule.with_new_plan(step)
        self.history.append(
            Decision(step, reason, len(changed), plan.error, plan.limit, plan.after.step_seconds)
        )
        _LOG.info("auto, step %d: %s. %s", step, reason, plan.reason)

    def _reason(self, situation: Situation, step: int) -> str | None:
        """Return why to make a new plan, or None."""
        basis = self._basis
        if self.plan is None or basis is None:
            return "the first plan"
        error = situation.error_of(self.plan)
        self._basis = basis = replace(basis, error=error, limit=situation.limit)
        if error > _BEYOND_LIMIT * situation.limit:
            return f"the error of the plan is {error:.3g}, its limit {situation.limit:.3g}"
        if not self._has_time(step):
            return None
        norm = _total(situation.norms)
        return basis.reason(situation.link, norm, self._trials, step, self._replan)

    def _plan_probe(self, step: int) -> None:
        """Probe the link in the step after the next one, if that is needed."""
        is_due = self.proposal is None and self._link.wants_probe
        if is_due and self._has_time(step, self._link.probe_seconds()):
            self._probe_step = step + 1

    def _has_time(self, step: int, seconds: float = 0.0) -> bool:
        """Return whether plans and probes have taken a small share of the time."""
        agreed = self._agreed
        if agreed is None or not agreed.planning_seconds >= 0 or not agreed.step_seconds > 0:
            return False
        spent = self._plans * agreed.planning_seconds + self._probe_seconds + seconds
        return spent <= _PLANNING_SHARE * agreed.step_seconds * (step - self._origin)

    def _situation(self) -> Situation | None:
        """Return what is known, None if it is not enough for a plan."""
        agreed, layout, link = self._agreed, self.layout, self._link.cost
        if agreed is None or layout is None or link is None:
            return None
        norms = tuple(self._norm(group) for group in layout.groups)
        limit = self._limit(layout, norms)
        if not all(math.isfinite(norm) for norm in norms) or not math.isfinite(limit):
            return None
        return Situation(
            self.candidates.specs,
            self.candidates.lossless,
            layout,
            self.knowledge,
            agreed,
            link,
            norms,
            limit,
            backend_of(self._backend, self._link.byte_cpu_seconds),
            self._size,
        )

    def _add_norm(self, group: ParameterGroup, norm: float) -> None:
        """Keep the last norms by parameter, so that they outlive other buckets."""
        of_each = norm / math.sqrt(len(group.names))
        for name in group.names:
            self._norms[name] = [*self._norms.get(name, ()), of_each][-_NORMS:]

    def _norm(self, group: ParameterGroup) -> float:
        """Return the norm of the average gradient of a group.

        It is that of what hooks have returned. With error feedback they send, in the mean, as much
        as there is.
        """
        return _total([median(self._norms.get(name, [math.nan])) for name in group.names])

    def _limit(self, layout: Layout, norms: Sequence[float]) -> float:
        reference = self.candidates.reference
        if reference is None:
            return float(self.candidates.limit)
        return self.knowledge.limit(layout, norms, reference)

    def problem(self) -> Problem | None:
        """Return what the next plan would be made for; None if not enough is known."""
        situation = self._situation()
        return None if situation is None else situation.problem(self._hooks_in_use())

    # -------------------------------------------------------------------------------------- trials

    def _trials_until(self, end: int) -> list[tuple[ParameterGroup, int, int]]:
        """Return the trials that are reported in step ``end``."""
        return [trial for step in range(self._window_start, end) for trial in self.trials(step)]

    def _choose(self, number: int, step: int) -> tuple[ParameterGroup, int] | None:
        """Return the group and the hook of a trial.

        At first each hook on the largest group. Then whatever has not been measured yet, or else
        everything. On groups that stay exact, only the reference is tried.
        """
        assert self.layout is not None
        assert self.schedule is not None
        every = sorted(self.layout.groups, key=lambda group: (-group.elements, group.names))
        groups = [group for group in every if not group.is_exact]
        tried = self.candidates.tried
        if not groups or not tried:
            return None
        if self.schedule.is_burst(step):
            return groups[0], self._unknown()[number - self.schedule.trials_before]
        reference = self.candidates.reference
        pairs = [(g, reference) for g in every if g.is_exact] if reference is not None else []
        pairs += [(group, i) for group in groups for i in tried]
        missing = [pair for pair in pairs if not self.knowledge.is_measured(*pair)]
        choices = missing or pairs
        return choices[number % len(choices)]

    def _unknown(self) -> list[int]:
        """Return the hooks that were never tried; none if all groups stay exact."""
        has_groups = self.layout and not all(group.is_exact for group in self.layout.groups)
        tried = self.candidates.tried if has_groups else ()
        return [i for i in tried if not self.knowledge.is_known(i)]

    def _hooks_in_use(self) -> dict[str, str] | None:
        """Return the hook of each parameter, None before the first plan."""
        return None if self.plan is None else self.plan.hook_of()

    def _hook_in_use(self, group: ParameterGroup) -> int:
        if self.plan is None:
            return 0
        spec = self.plan.hook_of().get(group.names[0], self.candidates.specs[0])
        return self.candidates.specs.index(spec)

    # --------------------------------------------------------------------------- state and metrics

    def metrics(self) -> dict[str, float]:
        """Return numbers about the plan in use and the link."""
        found = {"plans": float(len(self.history))}
        if self._link.cost is not None:
            found["link_megabits_per_second"] = 8e-6 / max(self._link.cost.per_byte, 1e-15)
            found["link_round_microseconds"] = self._link.cost.per_unit * 1e6
        if self.plan is not None and self._basis is not None:
            found["error"], found["limit"] = self._basis.error, self._basis.limit
            found["predicted_seconds"] = self.plan.after.step_seconds
        if self._agreed is not None and self._agreed.step_seconds > 0:
            found["step_seconds"] = self._agreed.step_seconds
        return found

    def to_json(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, in JSON's types."""
        return {
            "plan": self.plan and self.plan.to_json(),
            "knowledge": self.knowledge.to_json(),
            "norms": self._norms,
            "history": [vars(decision) for decision in self.history],
            "basis": self._basis and vars(self._basis),
            "trials": self._trials,
            "link": self._link.to_json(),
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Take over what :meth:`to_json` returned."""
        self.plan = None if data["plan"] is None else Plan.from_json(data["plan"])
        self.awaits_confirmation = True
        self.knowledge.load(data["knowledge"])
        self._norms = dict(data["norms"])
        self.history = [Decision(**decision) for decision in data["history"]]
        self._trials = int(data["trials"])
        basis = data["basis"]
        self._basis = basis and Basis(**{**basis, "link": Cost(*basis["link"])})
        self._link.load(data["link"])


def _check_equal(digests: Sequence[int]) -> None:
    if len(set(digests)) > 1:
        raise CommHookMismatchError(
            "hook 'auto': expected the same plan on all ranks, found those with the digests "
            f"{[f'{digest:0{_DIGITS}x}' for digest in digests]} by rank. Load the same state on "
            "all ranks, and use machines that compute the same floating-point results. From now "
            "on, all ranks average exactly, and begin to measure again"
        )


def _total(norms: Sequence[float]) -> float:
    return math.sqrt(math.fsum(norm**2 for norm in norms))
