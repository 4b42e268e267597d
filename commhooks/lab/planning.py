"""Measures what hooks do with each group of a model's parameters, to plan without training.

::

    a model, hooks  ── measure_groups() ──►  MeasuredGroups  ── problem(network, limit) ──►  Problem

Two ranks on this machine average the gradients, which shows errors. Dry runs among as many ranks
as are planned for show seconds and bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist

from commhooks.algorithms.adaptive.choices import exact_names, group_parameters
from commhooks.algorithms.wrappers.trial import Trial, relative_error
from commhooks.cluster import Ranks
from commhooks.comm.communicator import Communicator
from commhooks.comm.exchange import Exchange
from commhooks.costs.backends import Backend, Gloo
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace, StepTrace, merged_work
from commhooks.errors import CommHookError, reason_of
from commhooks.hook.base import CommHook, ModelInfo, is_lossless
from commhooks.hook.derived_bucket import BucketPart, bucket_with
from commhooks.hook.registry import create
from commhooks.hook.spec import HookSpec
from commhooks.lab.machine import check_model
from commhooks.lab.simulation.dry_run import check_kernels
from commhooks.lab.simulation.measurements import Job, ProfiledModel, measure_gloo
from commhooks.lab.simulation.study import BASELINE
from commhooks.planning import Choice, Group, Problem
from commhooks.planning.problem import overhead_of, relative
from reducer import GradBucket

_RANKS = 2
_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class MeasuredGroups:
    """The measurements of a job. Hooks are given by the texts of their specs."""

    groups: tuple[Group, ...]
    outcomes: Mapping[str, Mapping[int, Choice]]
    """Measured effects on the groups that hooks can average, by hook and the group's position."""
    step: StepTrace
    """A step without hooks."""
    gloo: Gloo
    reasons: Mapping[str, str]
    """Why hooks can average no group."""

    @property
    def alone_seconds(self) -> float:
        """The time of a step without communication on this machine."""
        return self.step.forward_seconds + self.step.backward_seconds

    def error_of(self, hook: str) -> float:
        """Return the relative error of one hook for all parameters.

        Groups that it cannot average are averaged exactly.
        """
        norms = [group.norm for group in self.groups]
        squares = ((each.error * norms[i]) ** 2 for i, each in self.outcomes[hook].items())
        return relative(squares, norms)

    def problem(
        self,
        hooks: Sequence[str],
        network: Network,
        backend: Backend,
        *,
        cores: float,
        speed: float,
        error: float,
    ) -> Problem:
        """Return the problem of choosing from ``hooks``, plain averaging first.

        The ranks compute ``speed`` times as fast as this machine.
        """
        outcomes = {
            hook: {i: merged_work([each], lambda s: s[0] / speed) for i, each in of_hook.items()}
            for hook, of_hook in self.outcomes.items()
        }
        overheads = {hook: overhead_of(outcomes[hook].values()) for hook in hooks}
        groups = (
            replace(
                group,
                choices={
                    hook: outcomes[hook][i].scaled(group.elements, overheads[hook])
                    for hook in (hooks[:1] if group.is_exact else hooks)
                    if i in outcomes[hook]
                },
            )
            for i, group in enumerate(self.groups)
        )
        step = self.step.faster(speed)
        return Problem(overheads, tuple(groups), step, network, backend, cores, error)


def measure_groups(
    job: Job, hooks: Sequence[HookSpec], exact: Sequence[str], world_size: int
) -> MeasuredGroups:
    """Measure with two ranks on this machine, which takes seconds to minutes.

    A candidate that fails, or refuses all groups, is left out, with the reason.

    Args:
        job: The model, and how it is trained.
        hooks: Hooks to measure, plain averaging first.
        exact: Rules for parameters that are averaged exactly.
        world_size: The number of ranks to plan for.

    Raises:
        CommHookOptionError: a rule is invalid.
        ModelError: the model cannot be made or run.
        LimitError: there is too little memory.
        CommHookError: plain averaging fails, or a hook needs CuPy, and it cannot be used.
    """
    exact_names(exact, {}, None)  # before processes start
    check_model(job, _RANKS)
    check_kernels(hooks, job.device)
    reasons: dict[str, str] = {}
    outcomes: dict[str, dict[int, Choice]] = {}
    with Ranks(_RANKS, device=job.device, timeout=_TIMEOUT_SECONDS) as ranks:
        gloo: Gloo = ranks(measure_gloo)[0]
        ranks.keep(_GroupedModel, job, tuple(exact), world_size)
        groups, step = ranks.call(_GroupedModel.prepared)[0]
        for hook in hooks:
            try:
                outcomes[hook.text], refusal = ranks.call(_GroupedModel.measure, hook.config)[0]
            except Exception as error:
                if hook is hooks[0]:
                    raise
                outcomes[hook.text], refusal = {}, reason_of(error)
                ranks.restart()
            if not outcomes[hook.text]:
                reasons[hook.text] = refusal
    return MeasuredGroups(groups, outcomes, step, gloo, reasons)


class _GroupedModel(ProfiledModel):
    """The model on this rank, one step of it, and its groups."""

    def __init__(self, rank: int, job: Job, exact: Sequence[str], world_size: int) -> None:
        super().__init__(rank, job, _RANKS)
        self._world_size = world_size
        self._group = cast("dist.ProcessGroup", dist.group.WORLD)
        apart = exact_names(exact, self.parameters, self.roles)
        self.step = self.profile(apart.__contains__)  # as the hook `auto` divides buckets
        names = [bucket.names for bucket in self.step.buckets]
        groups = group_parameters(names, self.parameters, apart, self.roles)
        plain = (self._squares(create(BASELINE), self._gradients(group)) for group in groups)
        self.groups = tuple(
            replace(group, norm=math.sqrt(square))
            for group, (_, square) in zip(groups, plain, strict=True)
        )
        self._traces: dict[object, BucketTrace] = {}
        """Traces of dry runs, which groups of the same shapes share."""

    def prepared(self) -> tuple[tuple[Group, ...], StepTrace]:
        """Return the groups, and a step without hooks."""
        return self.groups, self.step.trace

    def measure(self, config: Mapping[str, Any]) -> tuple[dict[int, Choice], str]:
        """Return what a hook does with each group that it can average.

        The text says why it cannot average the others.
        """
        found, refusal = dict[int, Choice](), ""
        for i, group in enumerate(self.groups):
            gradients = self._gradients(group)
            try:
                made = create(config)
                error = relative_error(*self._squares(made, gradients))
                trace = self._trace(config, gradients)
            except CommHookError as failure:  # on all ranks alike
                refusal = refusal or reason_of(failure)
                continue
            error = 0.0 if is_lossless(made) else error
            found[i] = Choice(trace.local_seconds, trace.collectives, error, group.elements)
        return found, refusal

    def _gradients(self, group: Group) -> GradBucket:
        bucket = self.step.buckets[group.bucket]
        members = [bucket.names.index(name) for name in group.names]
        return BucketPart(bucket, members).bucket(0, is_last=True)

    @torch.no_grad()
    def _squares(self, hook: CommHook, gradients: GradBucket) -> Sequence[float]:
        """Average a bucket, which does not change: return |average - exact|^2 and |exact|^2.

        Its collectives run one after the other. Raises CommHookError if the hook cannot average it.
        """
        parameters = dict(zip(gradients.names, gradients.parameters(), strict=True))
        info, step = ModelInfo(self.roles), self.job.first_step
        trial = Trial(hook, parameters, self._group, info)
        sample = bucket_with(gradients, gradients.buffer().clone(), step=step)
        coroutine = trial.measure(sample, Communicator(self._group, step=step, key=sample.key))
        while True:
            try:
                pending = coroutine.send(None)
            except StopIteration as stop:
                squares: list[float] = stop.value.tolist()
                return squares
            if isinstance(pending, Exchange) or pending.members:
                coroutine.close()
                raise CommHookError(
                    f"hook {hook!r} cannot be planned: expected a hook that averages among all "
                    "ranks in the same step"
                )
            pending.run(self._group)

    def _trace(self, config: Mapping[str, Any], gradients: GradBucket) -> BucketTrace:
        """Return what the hook does with a bucket in a typical step."""
        key = str(config), tuple(tuple(gradient.shape) for gradient in gradients.gradients())
        if key not in self._traces:
            runs = self.dry_runs(config, [gradients], [self._world_size])
            _, typical = max(runs.at(self._world_size), key=itemgetter(0))
            self._traces[key] = typical.buckets[0]
        return self._traces[key]
