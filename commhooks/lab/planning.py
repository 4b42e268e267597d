"""Measures what hooks do with each group of a model's parameters, to plan without training.

::

    a model, hooks  ── measure_groups() ──►  Measured  ── problem(network, limit) ──►  Problem

Two ranks on this machine average the gradients, which shows errors. Dry runs among as many ranks
as are planned for show seconds and bytes.
"""

import math
from collections.abc import Coroutine, Mapping, Sequence
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
from commhooks.costs.step_trace import BucketTrace, StepTrace
from commhooks.errors import CommHookError, reason_of
from commhooks.hook.base import CommHook, is_lossless
from commhooks.hook.derived_bucket import BucketPart, bucket_with
from commhooks.hook.registry import create
from commhooks.hook.spec import HookLike, config_of
from commhooks.lab.simulation.dry_run import dry_run
from commhooks.lab.simulation.measurements import Job, RankSide, measure_gloo
from commhooks.planning import Group, Outcome, Problem
from commhooks.planning.problem import overheads_of
from reducer import GradBucket

__all__ = ["Measured", "PlanningJob", "measure_groups"]

_RANKS = 2
_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class PlanningJob:
    """What to measure: ``hooks``, and the rules for parameters averaged exactly."""

    job: Job
    hooks: tuple[HookLike, ...]
    """Plain averaging first."""
    exact: tuple[str, ...]
    world_size: int

    def __post_init__(self) -> None:
        exact_names(self.exact, {}, None)  # raises CommHookOptionError before processes start


@dataclass(frozen=True)
class Measured:
    """The measurements of a job."""

    groups: tuple[Group, ...]
    outcomes: Mapping[tuple[int, int], Outcome]
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
        outcomes = {
            key: replace(each, local_seconds=tuple(s / speed for s in each.local_seconds))
            for key, each in self.outcomes.items()
        }
        overheads, step = overheads_of([*outcomes.values()], len(hooks)), self.step.faster(speed)
        groups = [
            replace(
                group,
                choices=tuple(
                    outcomes[i, hook].choice(group.elements, overhead, outcomes[i, hook].error)
                    for hook, overhead in enumerate(overheads)
                    if (i, hook) in outcomes and not (group.is_exact and hook > 0)
                ),
            )
            for i, group in enumerate(self.groups)
        ]
        return Problem(
            hooks=tuple(hooks),
            overheads=overheads,
            groups=tuple(groups),
            buckets=step.buckets,
            forward_seconds=step.forward_seconds,
            network=network,
            backend=backend,
            cores=cores,
            error=error,
        )


def measure_groups(job: PlanningJob) -> Measured:
    """Measure with two ranks on this machine, which takes seconds to minutes.

    A candidate that fails, or refuses all groups, is left out, with the reason. Raises ModelError,
    and the error of the first candidate, plain averaging.
    """
    reasons: dict[int, str] = {}
    outcomes: dict[tuple[int, int], Outcome] = {}
    norms: dict[int, float] = {}
    with Ranks(_RANKS, timeout=_TIMEOUT_SECONDS) as ranks:
        gloo = measure_gloo(ranks)
        groups, step = ranks(_prepare, job)[0]
        for hook, config in enumerate(map(config_of, job.hooks)):
            try:
                found, refusal = ranks(_measure, hook, config)[0]
                outcomes |= {(i, hook): outcome for i, (outcome, _) in found.items()}
                norms |= {i: norm for i, (_, norm) in found.items()}
                if not found:
                    reasons[hook] = refusal
            except Exception as error:
                if hook == 0:
                    raise
                reasons[hook] = reason_of(error)
                ranks.restart()
                ranks(_prepare, job)
    known = (replace(group, norm=norms[i]) for i, group in enumerate(groups))
    return Measured(tuple(known), outcomes, step, gloo, reasons)


@dataclass
class _Apart(CommHook):
    """Wants parameters in ``exact`` in buckets of their own, as the hook ``auto`` does."""

    exact: set[str]

    def bucket_key(self, parameter: str) -> bool:
        return parameter in self.exact


class _Side:
    """The model on this rank, one step of it, and its groups."""

    def __init__(self, rank: int, planned: PlanningJob) -> None:
        self.planned = planned
        side = RankSide(rank, planned.job, _RANKS)
        self.roles = side.roles
        exact = exact_names(planned.exact, side.parameters, side.roles)
        self.step = side.profile(_Apart(exact))
        names = [bucket.names for bucket in self.step.buckets]
        self.groups = group_parameters(names, side.parameters, exact, side.roles)
        known = dry_run_sizes([planned.world_size], planned.job.ranks_per_node)
        self.sizes = [planned.world_size] if planned.world_size in known else known
        self.traces: dict[object, BucketTrace] = {}
        """Of dry runs, which groups of the same shapes share."""


_sides: list[_Side] = []  # at most one


def _prepare(rank: int, planned: PlanningJob) -> tuple[tuple[Group, ...], StepTrace]:
    side = _Side(rank, planned)
    _sides[:] = [side]
    return side.groups, side.step.trace


def _measure(
    rank: int,  # noqa: ARG001
    hook: int,
    config: Mapping[str, Any],
) -> tuple[dict[int, tuple[Outcome, float]], str]:
    """Return what a hook does with each group that it can average, and the norm of its average.

    The text says why it cannot average the others.
    """
    side, found, refusal = _sides[0], dict[int, tuple[Outcome, float]](), ""
    for i, group in enumerate(side.groups):
        bucket = side.step.buckets[group.bucket]
        members = [bucket.names.index(name) for name in group.names]
        gradients = BucketPart(bucket, members).bucket(0, is_last=True)
        try:
            with torch.no_grad():
                made = create(config)
                wrong, right = _squares(made, gradients, side)
                trace = _trace(config, gradients, side)
        except CommHookError as failure:  # on all ranks alike
            refusal = refusal or reason_of(failure)
            continue
        error = 0.0 if is_lossless(made) else relative_error(wrong, right)
        done = trace.local_seconds, trace.collectives
        found[i] = Outcome(i, hook, group.elements, *done, error), math.sqrt(right)
    return found, refusal


def _squares(hook: CommHook, gradients: GradBucket, side: _Side) -> tuple[float, float]:
    """Average a bucket, which does not change, and return the squared norms of a trial.

    Raises CommHookError if the hook cannot average it.
    """
    together = cast("dist.ProcessGroup", dist.group.WORLD)
    trial, step = Trial(hook), side.planned.job.first_step
    parameters = dict(zip(gradients.names, gradients.parameters(), strict=True))
    trial.prepare(parameters, together, side.roles)
    sample = bucket_with(gradients, gradients.buffer().clone(), step=step)
    comm = Communicator(together, step=step, key=sample.key, seed=0)
    wrong, right = _finish(trial.run(sample, comm), hook, together).tolist()
    return wrong, right


def _finish(
    coroutine: Coroutine[Any, Any, Tensor], hook: CommHook, group: dist.ProcessGroup
) -> Tensor:
    """Run a trial to its end, one collective after the other."""
    while True:
        try:
            pending = coroutine.send(None)
        except StopIteration as stop:
            squares: Tensor = stop.value
            return squares
        if isinstance(pending, Exchange) or pending.members:
            coroutine.close()
            raise CommHookError(
                f"hook {hook!r} cannot be planned: expected a hook that averages among all ranks "
                "in the same step"
            )
        pending.run(group)


def _trace(config: Mapping[str, Any], gradients: GradBucket, side: _Side) -> BucketTrace:
    """Return what the hook does with a bucket in a typical step."""
    key = str(config), tuple(tuple(gradient.shape) for gradient in gradients.gradients())
    if key not in side.traces:
        job = side.planned.job
        by_size = {
            size: dry_run(
                config,
                [gradients],
                dict(zip(gradients.names, gradients.parameters(), strict=True)),
                side.roles,
                size=size,
                ranks_per_node=job.ranks_per_node,
                first_step=job.first_step,
            )
            for size in side.sizes
        }
        kinds = DryRuns(by_size, job.ranks_per_node).at(side.planned.world_size)
        _, typical = max(kinds, key=lambda kind: kind[0])
        side.traces[key] = typical.buckets[0]
    return side.traces[key]
