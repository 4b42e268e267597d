"""Measures what hooks do with each group of a model's parameters, to plan without training.

::

    a model, hooks  ── measure_groups() ──►  Measured  ── problem(network, limit) ──►  Problem

Two ranks on this machine average the gradients, which shows errors. Dry runs among as many ranks
as are planned for show seconds and bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.adaptive.groups import exact_names, group_parameters
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
from commhooks.hook.spec import HookLike, config_of
from commhooks.lab.simulation.dry_run import dry_run
from commhooks.lab.simulation.measurements import Job, RankSide, measure_gloo
from commhooks.planning import Choice, Group, Problem
from commhooks.planning.problem import overheads_of
from reducer import GradBucket

_RANKS = 2
_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Measured:
    """The measurements of a job."""

    groups: tuple[Group, ...]
    outcomes: Mapping[tuple[int, int], Choice]
    """What hooks do with groups, by the positions of both; without those that cannot average it."""
    step: StepTrace
    """A step without hooks."""
    gloo: Gloo
    reasons: Mapping[int, str]
    """Why hooks can average no group, by their position."""

    @property
    def alone_seconds(self) -> float:
        """The time of a step without communication on this machine."""
        return self.step.forward_seconds + self.step.backward_seconds

    def error_of(self, hook: int) -> float:
        """Return the relative error of one hook for all parameters.

        Groups that it cannot average are averaged exactly.
        """
        total = math.fsum(group.norm**2 for group in self.groups)
        lost = math.fsum(
            (outcome.error * self.groups[i].norm) ** 2
            for (i, position), outcome in self.outcomes.items()
            if position == hook
        )
        return math.sqrt(lost / total) if total else 0.0

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
        """Return the problem of choosing from ``hooks``, the first of the measured ones.

        The ranks compute ``speed`` times as fast as this machine.
        """
        step = self.step.faster(speed)
        outcomes = {
            key: merged_work([each], lambda seconds: seconds[0] / speed)
            for key, each in self.outcomes.items()
        }
        overheads = overheads_of(outcomes, len(hooks))
        choices: dict[int, list[Choice]] = {i: [] for i in range(len(self.groups))}
        for (i, hook), outcome in sorted(outcomes.items()):
            group = self.groups[i]
            if hook == 0 or (hook < len(hooks) and not group.is_exact):
                choices[i].append(outcome.scaled(group.elements, overheads[hook]))
        return Problem(
            hooks=tuple(hooks),
            overheads=overheads,
            groups=tuple(replace(self.groups[i], choices=tuple(choices[i])) for i in choices),
            buckets=step.buckets,
            forward_seconds=step.forward_seconds,
            network=network,
            backend=backend,
            cores=cores,
            error=error,
        )


def measure_groups(
    job: Job, hooks: Sequence[HookLike], exact: Sequence[str], world_size: int
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
    planned = job, tuple(exact), world_size
    reasons: dict[int, str] = {}
    outcomes: dict[tuple[int, int], Choice] = {}
    norms: dict[int, float] = {}
    with Ranks(_RANKS, timeout=_TIMEOUT_SECONDS) as ranks:
        gloo = measure_gloo(ranks)
        groups, step = ranks(_prepare, *planned)[0]
        for hook, config in enumerate(map(config_of, hooks)):
            try:
                found, refusal = ranks(_measure, hook, config)[0]
            except Exception as error:
                if hook == 0:
                    raise
                found, refusal = {}, reason_of(error)
                ranks.restart()
                ranks(_prepare, *planned)
            outcomes |= {(i, hook): outcome for i, (outcome, _) in found.items()}
            norms |= {i: norm for i, (_, norm) in found.items()}
            if not found:
                reasons[hook] = refusal
    known = (replace(group, norm=norms[i]) for i, group in enumerate(groups))
    return Measured(tuple(known), outcomes, step, gloo, reasons)


@dataclass
class _Apart(CommHook):
    """Wants parameters in ``exact`` in buckets of their own, as the hook ``auto`` does."""

    exact: set[str]

    def bucket_key(self, parameter: str) -> bool:
        return parameter in self.exact


_sides: list["_Side"] = []  # at most one


def _prepare(
    rank: int, job: Job, exact: Sequence[str], world_size: int
) -> tuple[tuple[Group, ...], StepTrace]:
    side = _Side(rank, job, exact, world_size)
    _sides[:] = [side]
    return side.groups, side.step.trace


def _measure(
    rank: int,  # noqa: ARG001
    hook: int,
    config: Mapping[str, Any],
) -> tuple[dict[int, tuple[Choice, float]], str]:
    return _sides[0].measure(hook, config)


class _Side:
    """The model on this rank, one step of it, and its groups."""

    def __init__(self, rank: int, job: Job, exact: Sequence[str], world_size: int) -> None:
        self._job, self._world_size = job, world_size
        side = RankSide(rank, job, _RANKS)
        self._roles = side.roles
        apart = exact_names(exact, side.parameters, side.roles)
        self.step = side.profile(_Apart(apart))
        names = [bucket.names for bucket in self.step.buckets]
        self.groups = group_parameters(names, side.parameters, apart, side.roles)
        known = dry_run_sizes([world_size], job.ranks_per_node)
        self._sizes = [world_size] if world_size in known else known
        self._traces: dict[object, BucketTrace] = {}
        """Traces of dry runs, which groups of the same shapes share."""

    def measure(
        self, hook: int, config: Mapping[str, Any]
    ) -> tuple[dict[int, tuple[Choice, float]], str]:
        """Return what a hook does with each group that it can average, and the norm of its average.

        The text says why it cannot average the others.
        """
        found, refusal = dict[int, tuple[Choice, float]](), ""
        for i, group in enumerate(self.groups):
            bucket = self.step.buckets[group.bucket]
            members = [bucket.names.index(name) for name in group.names]
            gradients = BucketPart(bucket, members).bucket(0, is_last=True)
            parameters = dict(zip(gradients.names, gradients.parameters(), strict=True))
            try:
                made = create(config)
                with torch.no_grad():
                    wrong, right = self._squares(made, gradients, parameters)
                    trace = self._trace(config, gradients, parameters)
            except CommHookError as failure:  # on all ranks alike
                refusal = refusal or reason_of(failure)
                continue
            error = 0.0 if is_lossless(made) else relative_error(wrong, right)
            done = trace.local_seconds, trace.collectives
            found[i] = Choice(hook, *done, error, group.elements), math.sqrt(right)
        return found, refusal

    def _squares(
        self, hook: CommHook, gradients: GradBucket, parameters: Mapping[str, Tensor]
    ) -> tuple[float, float]:
        """Average a bucket, which does not change, and return the squared norms of a trial.

        Its collectives run one after the other. Raises CommHookError if the hook cannot average it.
        """
        together = cast("dist.ProcessGroup", dist.group.WORLD)
        trial, step = Trial(hook), self._job.first_step
        trial.prepare(parameters, together, self._roles)
        sample = bucket_with(gradients, gradients.buffer().clone(), step=step)
        coroutine = trial.run(sample, Communicator(together, step=step, key=sample.key, seed=0))
        while True:
            try:
                pending = coroutine.send(None)
            except StopIteration as stop:
                wrong, right = stop.value.tolist()
                return wrong, right
            if isinstance(pending, Exchange) or pending.members:
                coroutine.close()
                raise CommHookError(
                    f"hook {hook!r} cannot be planned: expected a hook that averages among all "
                    "ranks in the same step"
                )
            pending.run(together)

    def _trace(
        self,
        config: Mapping[str, Any],
        gradients: GradBucket,
        parameters: Mapping[str, Tensor],
    ) -> BucketTrace:
        """Return what the hook does with a bucket in a typical step."""
        key = str(config), tuple(tuple(gradient.shape) for gradient in gradients.gradients())
        if key not in self._traces:
            job = self._job
            by_size = {
                size: dry_run(
                    config,
                    [gradients],
                    parameters,
                    self._roles,
                    size=size,
                    ranks_per_node=job.ranks_per_node,
                    first_step=job.first_step,
                )
                for size in self._sizes
            }
            kinds = DryRuns(by_size, job.ranks_per_node).at(self._world_size)
            _, typical = max(kinds, key=lambda kind: kind[0])
            self._traces[key] = typical.buckets[0]
        return self._traces[key]
