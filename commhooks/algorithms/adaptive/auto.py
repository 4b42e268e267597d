"""Choose a hook for each group of parameters, within a limit of error, while training goes on.

::

    every bucket:   parameters ── plan ──► parts, one per hook; their collectives are timed
    some steps:     try one hook on a sample of one group: its error, bytes and seconds
    every k steps:  all_gather(what was measured); plan = solve(problem)    # the same on all ranks
    next step:      parts follow the new plan; residuals are added to the gradients once

Note [The same plan]
~~~~~~~~~~~~~~~~~~~~
A plan that differs between ranks would hang or mix up numbers. So whatever decides is a function of
the numbers of steps and of what all ranks have reported: which step tries or reports what, and the
plan. A rank's own clock decides nothing.

    step s      gather the reports             if the step fails, all ranks drop them
    step s+1    solve; gather hashes           of the proposed plan and of the schedule
    step s+2    use the plan if all hashes are equal, else raise on all ranks

Ranks use what they have gathered at the beginning of the next step. If a step fails, even before it
reaches this hook on some rank, all ranks repeat it under the same number. So what was gathered
under the number of the present step is of a failed one, and dropped; all ranks have the rest.
Reports have a hash of the plan in use as well.
"""

import json
import time
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.adaptive.candidates import (
    check_candidate,
    default_candidates,
    hook_of_spec,
    spec_of,
)
from commhooks.algorithms.adaptive.control import Candidates, Controller
from commhooks.algorithms.adaptive.decision import Decision
from commhooks.algorithms.adaptive.fixed_plan import (
    exact_plan,
    hooks_of_plan,
    plan_of,
    positions_of,
)
from commhooks.algorithms.adaptive.groups import ParameterGroup, exact_names, group_parameters
from commhooks.algorithms.adaptive.link_watch import PROBE_MESSAGES
from commhooks.algorithms.adaptive.observation import Observation, observe
from commhooks.algorithms.adaptive.sample import draw_sample
from commhooks.algorithms.adaptive.table import HookTable
from commhooks.algorithms.adaptive.trial import Trial
from commhooks.algorithms.adaptive.watch import Watch
from commhooks.algorithms.exact.allreduce import AllReduce
from commhooks.algorithms.wrappers.route_rules import Rule
from commhooks.comm.communicator import Communicator
from commhooks.errors import (
    CommHookError,
    CommHookMismatchError,
    CommHookOptionError,
    CommHookStateError,
)
from commhooks.hook.base import CommHook, is_lossless
from commhooks.hook.options import Ge, Made
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from commhooks.planning import Plan
from reducer import GradBucket

__all__ = ["Auto"]

_STATE_KEY = "0000000000000000"
"""In the form of a bucket's key, because the state is that of no parameter."""
_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLE_SHARE = 1 << 14, 1 << 20, 1 / 64

Candidate = Annotated[CommHook, Made(hook_of_spec)]
_Trying = tuple[ParameterGroup, int, int]
PlanOption = Annotated[Plan | None, Made(plan_of)]


@register_hook("auto")
@dataclass
class Auto(CommHook):
    """Choose a hook for each group of parameters, such that steps are short and averages close.

    A group is the parameters of a bucket with the same role and a similar size. While training goes
    on, the hook measures the link, backward, and on samples of the gradients the error of each
    candidate. It then uses the plan that makes a step shortest while the relative error of a step's
    average stays within the limit. What backward hides stays exact. All ranks have the same plan.
    ``handle.hook.plan`` shows it, and ``handle.hook.history`` why and when it changed.

    When a parameter changes its hook, what the former one has not sent is added to its next
    gradient. Momenta of hooks such as ``dgc`` are lost.

    Until the first plan, averages are exact. They stay exact with one rank, and where no candidate
    keeps the error within the limit; ``plan`` then says so.

    The limit holds for the error of the average of a step, as sampled: not for the loss.

    Wire: that of the chosen hooks, and samples and reports, which take less than 2 % of the time.
    Memory: that of the chosen hooks, and samples of at most 1,048,576 elements.

    Metrics: ``error`` of the plan and its ``limit``, ``predicted_seconds`` of a step, the number of
    ``plans`` made, the estimates ``link_megabits_per_second`` and ``link_round_microseconds``, and
    ``planning_share``, what measuring and planning has taken of the time so far. ``step_seconds``
    is what a step takes on the slowest rank, to compare with the prediction.

    Raises:
        CommHookOptionError: a candidate changes parameters, has no consensus, or skips steps; or
            the plan is no plan, or has a hook that does not exist.
        CommHookError: at registration, if a candidate that you named cannot average this model, or
            the plan has a parameter that the model has not.
    """

    error: float | Candidate = "int4"  # type: ignore[assignment]  # becomes a hook
    """The limit: relative to the norm of the exact average, or a hook whose error on the whole
    model is the limit."""
    candidates: list[Candidate] | None = None
    """The hooks to choose from, besides plain averaging. None: those of candidates.py, and hooks of
    other packages with ``is_candidate``."""
    exact: list[Rule] = field(default_factory=lambda: ["@1d", "@embedding"])
    """Rules, as those of ``route``, for parameters that are always averaged exactly."""
    plan: PlanOption = field(default=None, repr=False, compare=False)
    """A plan to use for good: what ``commhooks plan --save`` wrote, or its path. Nothing is
    measured then, and equal runs have equal bits. Otherwise the plan in use is here."""
    replan: Annotated[int, Ge(1)] = 500
    """Make a new plan at least every so many steps."""

    _is_frozen: bool = field(default=False, init=False, repr=False, compare=False)
    _hooks: list[CommHook] = field(default_factory=list, init=False, repr=False, compare=False)
    """Plain averaging, then the candidates."""
    _table: HookTable = field(init=False, repr=False, compare=False)
    _control: Controller | None = field(default=None, init=False, repr=False, compare=False)
    """What measures and plans; None before :meth:`prepare`, and if the plan is fixed."""
    _trials: dict[int, Trial] = field(default_factory=dict, init=False, repr=False, compare=False)
    _watch: Watch = field(default_factory=Watch, init=False, repr=False, compare=False)
    _parameters: Mapping[str, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _gathered: "_Gathered" = field(
        default_factory=lambda: _Gathered(), init=False, repr=False, compare=False
    )
    _trying: _Trying | None = field(default=None, init=False, repr=False, compare=False)
    _exact_names: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _first_ns: int = field(default=0, init=False, repr=False, compare=False)
    _elapsed_ns: int = field(default=0, init=False, repr=False, compare=False)
    _spent_ns: int = field(default=0, init=False, repr=False, compare=False)

    wire = "what the chosen hooks send, and now and then samples and a report"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_frozen = self.plan is not None
        if self.plan is not None:
            self.candidates = hooks_of_plan(self.plan, self.name)
        elif self.candidates is None:
            self.candidates = default_candidates()
        for i, hook in enumerate(self.candidates):
            check_candidate(hook, f"option 'candidates.{i}' of hook {self.name!r}")
        if isinstance(self.error, CommHook):
            check_candidate(self.error, f"option 'error' of hook {self.name!r}")
        elif not self.error >= 0:
            raise CommHookOptionError(
                f"option 'error' of hook {self.name!r}: expected at least 0, found {self.error}"
            )
        self._hooks = [AllReduce(), *(h for h in self.candidates if type(h) is not AllReduce)]
        self._table = HookTable(self._hooks, {})
        exact_names(self.exact, {}, self.roles)

    @property
    def checks_finite(self) -> bool:  # type: ignore[override]  # depends on options
        """Whether one of the hooks checks."""
        return any(hook.checks_finite for hook in self._hooks)

    @property
    def history(self) -> list[Decision]:
        """The plans that were made, with their steps and reasons."""
        return [] if self._control is None else self._control.history

    def plot(self, path: Path | str) -> None:
        """Draw a step with plain averaging and one with the plan, as they were last measured.

        The type of the image follows from the name of ``path``. This does not communicate. It needs
        matplotlib.

        Raises:
            CommHookStateError: Not enough has been measured, or the plan is fixed.
        """
        from commhooks.planning.plot import draw_steps  # takes a second to import

        problem = self._control and self._control.problem()
        if not problem or self.plan is None or not self.plan.rows:
            raise CommHookStateError(
                f"hook {self.name!r}: expected a plan that was made in this training, found none; "
                "call plot after the first plan, or use `commhooks plan --plot`"
            )
        draw_steps(problem, self.plan, path)

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Prepare each candidate, and leave out those that cannot average this model.

        Raises CommHookError for such a candidate if the user has named the candidates.
        """
        is_same_model = self._parameters.keys() == parameters.keys()
        former, self._control = self._control if is_same_model else None, None
        self._parameters = parameters
        usable = self._prepare_candidates(parameters, group)
        self._watch, self._gathered, self._trying = Watch(), _Gathered(), None
        if self._is_frozen:
            assert self.plan is not None
            self._table.change(positions_of(self.plan, self._hooks, parameters, self.name))
            return
        self._table.change(dict.fromkeys(parameters, 0))
        if group.size() == 1:
            self.plan = exact_plan("Average exactly: there is one rank, so nothing is sent.")
            return
        self._control = self._make_control(usable, group)
        for i in self._control.candidates.tried:
            self._trials[i].prepare(parameters, group, self.roles)
        if former is not None:
            self._control.load(former.to_json())
        self._use_plan(self._control)

    def bucket_key(self, parameter: str) -> Hashable:
        """Return whether the parameter is always averaged exactly."""
        return parameter in self._exact_names

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        control = self._control
        if bucket.index() == 0:
            self._begin_step(bucket.step, comm.launched_ns)
        if control is None:
            return await self._run_parts(bucket, comm)
        self._watch.bucket(bucket, comm.launched_ns, control.window)
        if bucket.index() == 0:
            await self._gather(bucket, comm, control)
        trying = self._trying_on(bucket)
        sample = trying and self._sample(bucket, trying, comm.size)
        average = await self._run_parts(bucket, comm)
        self._watch.end_bucket()
        if control.reports(bucket.step + 1):
            self._measure_norms(bucket, average, control)
        if sample is not None and trying is not None:
            await self._try(trying, sample, comm, control)
        if bucket.index() == 0 and (elements := control.probe_elements(bucket.step)):
            await self._probe(elements, bucket.buffer().device, comm, control)
        return average

    def notes(self) -> list[tuple[int, str]]:
        own = [(each.step, str(each)) for each in self.history]
        return sorted(own + super().notes())

    def metrics(self) -> dict[str, float]:
        own = {} if self._control is None else self._control.metrics()
        if self._elapsed_ns:
            own["planning_share"] = self._spent_ns / self._elapsed_ns
        return own | super().metrics()

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        """Return what the hooks of a fixed plan send; otherwise it depends on what is measured."""
        if self._control is not None:
            return None
        costs = [
            self._hooks[i].wire_bytes(part.bucket(0, is_last=True), size)
            for i, part in self._table.parts(bucket)
        ]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    def recover(self) -> None:
        super().recover()
        self._watch.recover()
        if self._control is not None:
            self._control.recover()
        for trial in self._trials.values():
            trial.recover()
        self._table.refresh()

    # ---------------------------------------------------------------------------- state and config

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:  # noqa: ARG002
        return ()

    def bucket_fields(self) -> Sequence[StateField]:
        return (StateField("json", "same", (None,), torch.uint8),)

    def state_dict(self) -> dict[str, Any]:
        if self._control is not None and self._control.plan is not None:
            text = bytearray(json.dumps(self._control.to_json()).encode())
            self.state = {_STATE_KEY: {"json": torch.frombuffer(text, dtype=torch.uint8)}}
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._control is None:
            self._table.refresh()
            return
        self._control = self._control.new()
        if _STATE_KEY in self.state:
            text = bytes(self.state[_STATE_KEY]["json"].tolist())
            try:
                self._control.load(json.loads(text))
            except (KeyError, TypeError, ValueError) as error:
                raise CommHookStateError(
                    f"the saved plan of hook {self.name!r}: {error}"
                ) from error
        self._use_plan(self._control)

    def to_config(self) -> dict[str, Any]:
        plan = self.plan.to_json() if self._is_frozen and self.plan is not None else None
        return {**super().to_config(), "plan": plan}

    # --------------------------------------------------------------------------------- parts of it

    def _prepare_candidates(
        self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup
    ) -> list[int]:
        """Return the positions of the hooks that can average this model."""
        self._exact_names = exact_names(self.exact, parameters, self.roles)
        is_default = self.candidates == default_candidates()
        usable = []
        for i, hook in enumerate(self._hooks):
            try:
                hook.prepare(parameters, group)
                usable.append(i)
            except CommHookError:
                if not is_default:
                    raise
        if isinstance(self.error, CommHook):
            self.error.prepare(parameters, group)
        return usable

    def _make_control(self, usable: Sequence[int], group: dist.ProcessGroup) -> Controller:
        hooks = list(self._hooks)
        limit: float | int = 0.0
        if not isinstance(self.error, CommHook):
            limit = float(self.error)
        elif not is_lossless(self.error):
            limit = hooks.index(self.error) if self.error in hooks else len(hooks)
            hooks = hooks if self.error in hooks else [*hooks, self.error]
        tried = [i for i in usable if i > 0]
        if isinstance(limit, int) and limit not in tried:
            tried.append(limit)
        self._trials = {i: Trial(hooks[i]) for i in tried}
        if not isinstance(group, dist.ProcessGroup):
            raise CommHookError(
                f"hook {self.name!r} chooses by the times of its own collectives, so it cannot be "
                "simulated, nor be inside hierarchical; use `commhooks plan`, or give it a `plan`"
            )
        backend = group._get_backend(_device_of(self._parameters)).name()  # noqa: SLF001
        return Controller(
            Candidates(
                tuple(map(spec_of, self._hooks)),
                tuple(map(is_lossless, hooks)),
                tuple(tried),
                limit,
            ),
            replan=self.replan,
            backend=backend,
            size=group.size(),
        )

    def _begin_step(self, step: int, launched_ns: int) -> None:
        """Use what the last step has brought. Nothing here waits for another rank."""
        control = self._control
        if control is not None:
            start = time.monotonic_ns()
            self._first_ns = self._first_ns or start
            self._elapsed_ns = start - self._first_ns
            control = self._agree(control, step)
            self._spent_ns += time.monotonic_ns() - start
            buckets = self._watch.begin_step(step, launched_ns, control.window)
            if buckets is not None and not control.has_buckets(buckets):
                roles = self.roles or {}
                layout = group_parameters(buckets, self._parameters, self._exact_names, roles)
                control.use_layout(layout, step)
            self._trying = control.trial(step)
        self._table.begin_step()

    def _agree(self, control: Controller, step: int) -> Controller:
        """Use what ranks have gathered in the last step; see Note [The same plan]."""
        gathered, self._gathered = self._gathered, _Gathered(step)
        if gathered.step == step:
            return control
        try:
            digests = gathered.digests
            if digests is not None and control.confirm(digests.view(-1).tolist()):
                self._use_plan(control)
            if gathered.reports is not None:
                control.take(gathered.reports.tolist(), gathered.step, step)
        except CommHookMismatchError:
            self._control = control.new()
            self._use_plan(self._control)
            raise
        return control

    def _use_plan(self, control: Controller) -> None:
        plan = control.plan or exact_plan("Average exactly: nothing has been measured yet.")
        self.plan = plan
        self._table.change(positions_of(plan, self._hooks, self._parameters, self.name))

    async def _run_parts(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Let each hook average its parameters."""
        average = bucket.buffer()
        parts = self._table.parts(bucket)
        for i, part in parts:
            own = self._table.next_bucket(i, part)
            run = self._table.run(i, own, comm.within(self._hooks[i], key=own.key))
            found = await self._observed(run, i, own.buffer().numel())
            if len(parts) == 1:
                return found
            part.store(found, average)
        return average

    async def _observed(self, run: Coroutine[Any, Any, Tensor], i: int, elements: int) -> Tensor:
        """Await a run of hook ``i``, and note what it took."""
        if self._control is None:
            return await run
        window = self._control.window
        seen = Observation(window.links.add)
        found: Tensor = await observe(run, seen)
        window.runs.setdefault(i, []).append((elements, seen.local_seconds))
        return found

    async def _gather(self, bucket: GradBucket, comm: Communicator, control: Controller) -> None:
        """Send what is due at the beginning of this step."""
        device = bucket.buffer().device
        if control.awaits_confirmation:
            digest = torch.tensor([control.digest]).to(device)
            self._gathered.digests = await comm.all_gather(digest)
        if control.reports(bucket.step):
            start = time.monotonic_ns()
            numbers = torch.tensor(control.encode(bucket.step), dtype=torch.float64).to(device)
            seconds = (time.monotonic_ns() - start) * 1e-9
            seen = Observation(control.window.links.add)
            self._gathered.reports = await observe(_all_gather(numbers, comm), seen)
            self._spend(seconds + seen.link_seconds, control.window.report_seconds)

    def _trying_on(self, bucket: GradBucket) -> _Trying | None:
        """Return what to try on this bucket, if anything."""
        trying = self._trying
        if trying is None or not set(trying[0].names) <= set(bucket.names):
            return None
        self._trying = None
        return trying

    def _sample(self, bucket: GradBucket, trying: _Trying, size: int) -> GradBucket:
        group, _, number = trying
        elements = sum(parameter.numel() for parameter in self._parameters.values())
        limit = int(min(max(elements * _SAMPLE_SHARE, _LEAST_SAMPLE), _MOST_SAMPLE))
        return draw_sample(
            bucket,
            group.names,
            lambda name, gradient: self._table.residual(name, gradient, size),
            limit,
            number,
        )

    async def _try(
        self,
        trying: _Trying,
        sample: GradBucket,
        comm: Communicator,
        control: Controller,
    ) -> None:
        trial = self._trials[trying[1]]
        outcome = await trial.run(sample, comm, control.window.links.add)
        control.window.trials[sample.step] = outcome
        self._spend(outcome.seconds, control.window.trial_seconds)

    async def _probe(
        self, elements: int, device: torch.device, comm: Communicator, control: Controller
    ) -> None:
        """Average zeros, so that the link can be seen; see link_watch.py."""
        seen = Observation(control.window.links.add)
        zeros = torch.zeros(elements, device=device)
        for _ in range(PROBE_MESSAGES):
            await observe(_all_reduce(zeros, comm), seen)
        self._spend(seen.link_seconds, control.window.probe_seconds)

    def _spend(self, seconds: float, noted: list[float]) -> None:
        self._spent_ns += int(seconds * 1e9)
        noted.append(seconds)

    def _measure_norms(self, bucket: GradBucket, average: Tensor, control: Controller) -> None:
        flat = average.view(-1)
        values = zip(bucket.offsets, bucket.lengths, strict=True)
        views = {n: flat[i : i + m] for n, (i, m) in zip(bucket.names, values, strict=True)}
        for i, group in control.groups_of(bucket.names):
            of_group = [views[name] for name in group.names]
            norms = torch._foreach_norm(of_group)  # noqa: SLF001
            control.window.squares[i] = torch.stack(norms).double().square().sum()


async def _all_reduce(message: Tensor, comm: Communicator) -> Tensor:
    return await comm.all_reduce(message)


async def _all_gather(message: Tensor, comm: Communicator) -> Tensor:
    return await comm.all_gather(message)


def _device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    return next((p.device for p in parameters.values()), torch.device("cpu"))


@dataclass
class _Gathered:
    """What ranks have gathered in this step, of all ranks."""

    step: int = -1
    digests: Tensor | None = None
    """Of the proposed plan and the schedule."""
    reports: Tensor | None = None
