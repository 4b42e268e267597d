"""Measures what hooks do with each group of a model's parameters, to plan without training.

::

    a model, hooks  ── measure_groups() ──►  Measured  ── problem(network, limit) ──►  Problem

Two ranks on this machine average the gradients, which shows errors. Dry runs among as many ranks
as are planned for show seconds and bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.adaptive.choices import exact_names, group_parameters
from commhooks.algorithms.wrappers.trial import Trial, relative_error
from commhooks.cluster import Ranks
from commhooks.comm.communicator import Communicator
from commhooks.comm.exchange import Exchange
from commhooks.costs.backends import Backend, Gloo
from commhooks.costs.network import Network
from commhooks.costs.prediction import DryRuns, dry_run_sizes
from commhooks.costs.step_trace import BucketTrace, StepTrace, merged_work
from commhooks.errors import CommHookError, reason_of
from commhooks.hook.base import CommHook, is_lossless
from commhooks.hook.derived_bucket import BucketPart, bucket_with
from commhooks.hook.registry import create
from commhooks.hook.spec import HookSpec
from commhooks.lab.simulation.dry_run import dry_run
from commhooks.lab.simulation.measurements import Job, RankSide, measure_gloo
from commhooks.planning import Choice, Group, Problem
from commhooks.planning.problem import Outcomes, overheads_of, relative
from commhooks.precision import at_least_float32
from reducer import GradBucket

_RANKS = 2
_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Measured:
    """The measurements of a job. Hooks are given by the texts of their specs."""

    groups: tuple[Group, ...]
    outcomes: Outcomes
    """What hooks do with groups; without those that cannot average a group."""
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
        of_hook = {i: each.error for (i, its), each in self.outcomes.items() if its == hook}
        squares = ((error * self.groups[i].norm) ** 2 for i, error in of_hook.items())
        return relative(squares, (group.norm for group in self.groups))

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
            key: merged_work([each], lambda seconds: seconds[0] / speed)
            for key, each in self.outcomes.items()
        }
        overheads = overheads_of(outcomes, hooks)
        groups = (
            replace(
                group,
                choices={
                    hook: outcomes[i, hook].scaled(group.elements, overheads[hook])
                    for hook in (hooks[:1] if group.is_exact else hooks)
                    if (i, hook) in outcomes
                },
            )
            for i, group in enumerate(self.groups)
        )
        step = self.step.faster(speed)
        return Problem(overheads, tuple(groups), step, network, backend, cores, error)


def measure_groups(
    job: Job, hooks: Sequence[HookSpec], exact: Sequence[str], world_size: int
) -> Measured:
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
        CommHookError: plain averaging fails.
    """
    exact_names(exact, {}, None)  # before processes start
    reasons: dict[str, str] = {}
    outcomes: dict[tuple[int, str], Choice] = {}
    with Ranks(_RANKS, timeout=_TIMEOUT_SECONDS) as ranks:
        gloo = measure_gloo(ranks)
        ranks.make(_Side, job, tuple(exact), world_size)
        groups, step = ranks.do(_Side.prepared)[0]
        for hook in hooks:
            try:
                found, refusal = ranks.do(_Side.measure, hook.config)[0]
            except Exception as error:
                if hook is hooks[0]:
                    raise
                found, refusal = {}, reason_of(error)
                ranks.restart()
            outcomes |= {(i, hook.text): outcome for i, outcome in found.items()}
            if not found:
                reasons[hook.text] = refusal
    return Measured(groups, outcomes, step, gloo, reasons)


class _Side(RankSide):
    """The model on this rank, one step of it, and its groups."""

    def __init__(self, rank: int, job: Job, exact: Sequence[str], world_size: int) -> None:
        super().__init__(rank, job, _RANKS)
        self._world_size = world_size
        self._group = cast("dist.ProcessGroup", dist.group.WORLD)
        apart = exact_names(exact, self.parameters, self.roles)
        self.step = self.profile(apart.__contains__)  # as the hook `auto` divides buckets
        names = [bucket.names for bucket in self.step.buckets]
        groups = group_parameters(names, self.parameters, apart, self.roles)
        self.groups = tuple(replace(group, norm=self._norm(group)) for group in groups)
        known = dry_run_sizes([world_size], job.ranks_per_node)
        self._sizes = [world_size] if world_size in known else known
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
            parameters = dict(zip(gradients.names, gradients.parameters(), strict=True))
            try:
                made = create(config)
                with torch.no_grad():
                    error = self._error(made, gradients, parameters)
                    trace = self._trace(config, gradients, parameters)
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

    def _norm(self, group: Group) -> float:
        """Return the norm of the average gradient."""
        flat = self._gradients(group).buffer()
        average = flat.to(at_least_float32(flat.dtype), copy=True).div_(_RANKS)
        dist.all_reduce(average)
        return math.sqrt(average.double().square().sum())

    def _error(
        self, hook: CommHook, gradients: GradBucket, parameters: Mapping[str, Tensor]
    ) -> float:
        """Average a bucket, which does not change, and return the relative error.

        Its collectives run one after the other. Raises CommHookError if the hook cannot average it.
        """
        trial, step = Trial(hook, parameters, self._group, self.roles), self.job.first_step
        sample = bucket_with(gradients, gradients.buffer().clone(), step=step)
        coroutine = trial.run(sample, Communicator(self._group, step=step, key=sample.key))
        while True:
            try:
                pending = coroutine.send(None)
            except StopIteration as stop:
                return relative_error(*stop.value.tolist())
            if isinstance(pending, Exchange) or pending.members:
                coroutine.close()
                raise CommHookError(
                    f"hook {hook!r} cannot be planned: expected a hook that averages among all "
                    "ranks in the same step"
                )
            pending.run(self._group)

    def _trace(
        self,
        config: Mapping[str, Any],
        gradients: GradBucket,
        parameters: Mapping[str, Tensor],
    ) -> BucketTrace:
        """Return what the hook does with a bucket in a typical step."""
        key = str(config), tuple(tuple(gradient.shape) for gradient in gradients.gradients())
        if key not in self._traces:
            nodes, first = self.job.ranks_per_node, self.job.first_step
            run = partial(dry_run, config, [gradients], parameters, self.roles)
            by_size = {
                size: run(size=size, ranks_per_node=nodes, first_step=first) for size in self._sizes
            }
            _, typical = max(DryRuns(by_size, nodes).at(self._world_size), key=itemgetter(0))
            self._traces[key] = typical.buckets[0]
        return self._traces[key]
