"""Choose a hook for each group of parameters, within a limit of error, while training goes on.

::

    every bucket:   parameters ── plan ──► parts, one per hook: HookTable
    some steps:     ranks measure and report; rank 0 decides: measurement.py, planner.py
    then:           parts follow the new plan; residuals are added to the gradients once
"""

from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.adaptive.choices import (
    Buckets,
    check_plan,
    default_candidates,
    exact_names,
    group_parameters,
    hook_of_spec,
    parse_plan,
    wire_bytes_of,
)
from commhooks.algorithms.adaptive.measurement import Measurement
from commhooks.algorithms.adaptive.planner import AgreedState, Decision, Planner
from commhooks.algorithms.exact import AllReduce
from commhooks.algorithms.wrappers.route import Rule
from commhooks.algorithms.wrappers.table import HookTable, check_candidate
from commhooks.algorithms.wrappers.timing import clock_of
from commhooks.algorithms.wrappers.trial import Trial
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookError, CommHookOptionError, CommHookStateError
from commhooks.hook.base import CommHook, is_lossless
from commhooks.hook.options import Limits, Made, from_json, hook_default, option_names
from commhooks.hook.registry import register_hook
from commhooks.hook.spec import hook_spec, spec_of
from commhooks.hook.state import no_state
from commhooks.planning import Plan
from reducer import GradBucket
from reducer.backends import family_of
from reducer.native import NativeHook

Candidate = Annotated[CommHook, Made(hook_of_spec)]


@register_hook("auto")
@dataclass
class Auto(CommHook):
    """Choose a hook for each group of parameters, such that steps are short and averages close.

    In some of the first steps, and later every ``replan`` steps, the hook measures the link,
    backward, and on samples of the gradients the error of each candidate. It then uses the plan
    that makes a step shortest while the relative error of a step's average, as sampled, stays
    within the limit. All ranks have the same plan. ``handle.hook.plan`` shows it, and
    ``handle.hook.history`` why and when it changed. Until the first plan, averages are exact.

    Wire: that of the chosen hooks, and samples and reports, which take about 1 % of the time.
    Memory: that of the chosen hooks, and samples of at most 1,048,576 elements.

    Raises:
        CommHookOptionError: a candidate changes parameters, has no consensus, or skips steps; or
            the plan is no plan, or has a hook that does not exist.
        CommHookError: at registration, if a candidate that you named cannot average this model, or
            the plan has a parameter missing from the model; or inside ``hierarchical`` or
            ``diloco``, without a plan.
    """

    error: Annotated[float, Limits(ge=0)] | Candidate = hook_default("int4")
    """The limit: relative to the norm of the exact average, or a hook whose error on the whole
    model is the limit."""
    candidates: list[Candidate] | None = None
    """The hooks to choose from, besides plain averaging. None: those that ``commhooks plan
    --help`` lists, with hooks of other packages that have ``is_candidate``."""
    exact: list[Rule] = field(default_factory=lambda: ["@1d", "@embedding"])
    """Rules, as those of ``route``, for parameters that are always averaged exactly."""
    plan: Annotated[Plan | None, Made(parse_plan)] = field(default=None, compare=False)
    """A plan to use for good: what ``commhooks plan --save`` wrote, or its path. Nothing is
    measured then, and equal runs have equal bits. Otherwise the plan in use is here."""
    replan: Annotated[int, Limits(ge=1)] = 500
    """Make a new plan after at most this many steps."""

    state_fields = no_state
    wire = "what the chosen hooks send, and now and then samples and a report"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_frozen = self.plan is not None
        self._measuring: Measurement | None = None  # before prepare(), and if the plan is fixed
        self._parameters: Mapping[str, Tensor] = {}
        self._exact_names: set[str] = set()
        if self.plan is not None:
            try:
                specs = dict.fromkeys(row.hook for row in self.plan.rows)
                own = {spec: hook_spec(spec).create() for spec in specs}
            except CommHookError as error:
                raise CommHookOptionError(
                    f"option 'plan' of hook {self.name!r}: {error}"
                ) from error
            self.candidates = [*own.values()]
        else:
            self.candidates = default_candidates() if self.candidates is None else self.candidates
            own = {spec_of(hook): hook for hook in self.candidates}
        for i, hook in enumerate(self.candidates):
            check_candidate(hook, f"option 'candidates.{i}' of hook {self.name!r}")
        if isinstance(self.error, CommHook):
            check_candidate(self.error, f"option 'error' of hook {self.name!r}")
        self._hooks: dict[str, CommHook] = {AllReduce.name: AllReduce()} | own
        """By specs, the exact one first."""
        self._table = HookTable([*self._hooks.values()], {})
        exact_names(self.exact, {}, self.model_info.roles)

    def __repr__(self) -> str:
        """Source code of an equal hook: with a plan that it was given, not with one it has made."""
        options = {name: getattr(self, name) for name in option_names(type(self))}
        options["plan"] = self._given_plan()
        described = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{type(self).__qualname__}({described})"

    @property
    def is_adaptive(self) -> bool:
        return not self._is_frozen

    @property
    def history(self) -> list[Decision]:
        """The plans that were made, with their steps and reasons."""
        return [] if self._measuring is None else [*self._measuring.agreed.history]

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Prepare each candidate, and leave out those that cannot average this model.

        Raises CommHookError for such a candidate if the user has named the candidates.
        """
        former = self._measuring if self._parameters.keys() == parameters.keys() else None
        agreed = AgreedState() if former is None else former.agreed
        self._measuring = None
        self._parameters = parameters
        exact = exact_names(self.exact, parameters, self.model_info.roles)
        self._exact_names = exact.union(self.model_info.replicated)
        is_default = self.candidates == default_candidates()
        usable: dict[str, CommHook] = {}
        for spec, hook in self._hooks.items():
            with suppress(*((CommHookError,) if is_default else ())):
                hook.prepare(parameters, group)
                usable[spec] = hook
        if isinstance(self.error, CommHook):
            self.error.prepare(parameters, group)
        if self.plan is not None and self._is_frozen:
            check_plan(self.plan, parameters, self.name)
        elif group.size() == 1:
            self.plan = Plan.exact("Average exactly: there is one rank, so nothing is sent.")
        else:
            self._measuring = self._measurement(usable, group, agreed)
        self._use_plan()

    def bucket_key(self, parameter: str) -> Hashable:
        """Return whether the parameter is always averaged exactly."""
        return parameter in self._exact_names

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        measuring = self._measuring
        if bucket.index() == 0:
            if measuring is not None and measuring.begin_step(bucket.step):
                self._use_plan()
            self._table.begin_step()
        return await (self._table if measuring is None else measuring).reduce(bucket, comm)

    def native(self, group: dist.ProcessGroup, step: int | None = None) -> NativeHook | None:
        """Return what averages this step in place of this hook, None if nothing does.

        The answer is the same on all ranks.
        """
        if step is None or self.model_info.replicated:  # groups would change ways at other steps
            return None
        hooks, measuring = set(self._table.table.values()), self._measuring
        is_idle = measuring is None or measuring.is_idle(step)
        if len(hooks) != 1 or not is_idle or self._table.moving:
            return None
        return list(self._hooks.values())[hooks.pop()].native(group)

    def notes(self) -> list[tuple[int, str]]:
        return [(each.step, str(each)) for each in self.history]

    def metrics(self) -> dict[str, float]:
        own = {} if self._measuring is None else self._measuring.metrics()
        return own | super().metrics()

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        """Return what the hooks of a fixed plan send; otherwise it depends on what is measured."""
        if self._measuring is not None:
            return None
        return self._table.wire_bytes(bucket, size)

    def recover(self) -> None:
        super().recover()
        if self._measuring is not None:
            self._measuring.recover()
        self._table.refresh()

    # ---------------------------------------------------------------------------- state and config

    def state_dict(self) -> dict[str, Any]:
        self._table.drop_sent()
        if self._measuring is not None and self.history:
            self.extra_state = self._measuring.agreed.to_json()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._measuring is None:
            self._table.refresh()
            return
        try:
            self._measuring.load(from_json(AgreedState, self.extra_state))
            self._use_plan()
        except (KeyError, TypeError, ValueError) as error:
            raise CommHookStateError(f"the saved plan of hook {self.name!r}: {error}") from error

    def to_config(self) -> dict[str, Any]:
        return {**super().to_config(), "plan": self._given_plan()}

    # --------------------------------------------------------------------------------- parts of it

    def _given_plan(self) -> dict[str, Any] | None:
        return self.plan.to_json() if self._is_frozen and self.plan is not None else None

    def _measurement(
        self, usable: Mapping[str, CommHook], group: dist.ProcessGroup, agreed: AgreedState
    ) -> Measurement:
        hooks, parameters = dict(usable), self._parameters
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        # hierarchical's has no backend: each local rank would make a plan of its own.
        if not isinstance(group, dist.ProcessGroup) or family_of(group, device) == "undefined":
            raise CommHookError(
                f"hook {self.name!r} chooses by the times of its own collectives, so it cannot be "
                "simulated, nor be inside hierarchical; use `commhooks plan`, or give it a `plan`"
            )
        limit: float | str
        if isinstance(self.error, CommHook):
            limit = 0.0 if is_lossless(self.error) else spec_of(self.error)
            hooks.setdefault(spec_of(self.error), self.error)
        else:
            limit = self.error
        info = self.model_info
        trials = {s: Trial(hook, parameters, group, info) for s, hook in hooks.items()}

        def planner_of(buckets: Buckets) -> Planner:
            names = [each for each, _ in buckets]
            return Planner(
                group_parameters(names, parameters, self._exact_names, info.roles or {}),
                sum(nbytes for _, nbytes in buckets),
                hooks=list(usable),
                lossless={spec for spec, hook in hooks.items() if is_lossless(hook)},
                limit=limit,
                size=group.size(),
                backend=family_of(group, device),
                replan=self.replan,
                sent=lambda spec, own: wire_bytes_of(hooks[spec], own, parameters, group.size()),
            )

        return Measurement(planner_of, trials, self._table, clock_of(device), agreed)

    def _use_plan(self) -> None:
        if self._measuring is not None:
            self.plan = self._measuring.agreed.plan
        hook_of = {} if self.plan is None else self.plan.hook_of()
        positions = {spec: i for i, spec in enumerate(self._hooks)}
        self._table.change({n: positions[hook_of.get(n, AllReduce.name)] for n in self._parameters})
