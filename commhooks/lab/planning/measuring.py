"""Measures a model and candidates in processes on this machine."""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.adaptive.groups import ParameterGroup, exact_names, group_parameters
from commhooks.algorithms.wrappers.trial import Outcome, Trial
from commhooks.cluster import Ranks
from commhooks.comm.communicator import Communicator
from commhooks.comm.exchange import Exchange
from commhooks.costs.backends import Gloo
from commhooks.costs.prediction import DryRuns, dry_run_sizes
from commhooks.costs.step_trace import BucketTrace
from commhooks.errors import CommHookError, reason_of
from commhooks.hook.base import CommHook, is_lossless
from commhooks.hook.capabilities import Role
from commhooks.hook.derived_bucket import BucketPart, bucket_with
from commhooks.hook.registry import create
from commhooks.hook.spec import HookLike, config_of
from commhooks.lab.simulation.dry_run import dry_run
from commhooks.lab.simulation.measurements import Job, RankSide, measure_gloo
from reducer import GradBucket

__all__ = ["Measured", "MeasuredGroup", "PlanningJob", "measure_groups"]

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
class Cell:
    """What a hook does with a group."""

    norm: float = 0.0
    """Of the exact average."""
    error: float | None = None
    """Relative to ``norm``. None if the hook cannot average the group."""
    trace: BucketTrace | None = None
    """Among ``world_size`` ranks."""
    refusal: str = ""
    """Why the hook cannot average the group."""


@dataclass(frozen=True)
class MeasuredGroup:
    """A group of parameters, and what each hook does with it."""

    group: ParameterGroup
    cells: tuple[Cell, ...]

    @property
    def norm(self) -> float:
        """Of the average gradient."""
        return next((cell.norm for cell in self.cells if cell.norm), 0.0)


@dataclass(frozen=True)
class Measured:
    """The measurements of a job."""

    groups: tuple[MeasuredGroup, ...]
    buckets: tuple[BucketTrace, ...]
    forward_seconds: float
    gloo: Gloo
    reasons: Mapping[int, str]
    """Why hooks can average no group, by their index."""

    @property
    def alone_seconds(self) -> float:
        """The time of a step without communication on this machine."""
        backward = sum(bucket.backward_seconds + bucket.unpack_seconds for bucket in self.buckets)
        return self.forward_seconds + backward


def measure_groups(job: PlanningJob) -> Measured:
    """Measure with two ranks on this machine, which takes seconds to minutes.

    A candidate that fails, or refuses all groups, is left out, with the reason. Raises ModelError,
    and the error of the first candidate, plain averaging.
    """
    reasons: dict[int, str] = {}
    columns: list[list[Cell]] = []
    with Ranks(_RANKS, timeout=_TIMEOUT_SECONDS) as ranks:
        gloo = measure_gloo(ranks)
        groups, buckets, forward_seconds = ranks(_prepare, job)[0]
        for index, config in enumerate(map(config_of, job.hooks)):
            try:
                cells = ranks(_measure, config)[0]
                columns.append(cells)
                if all(cell.refusal for cell in cells):
                    reasons[index] = cells[0].refusal
            except Exception as error:
                if index == 0:
                    raise
                reasons[index] = reason_of(error)
                columns.append([Cell()] * len(groups))
                ranks.restart()
                ranks(_prepare, job)
    measured = tuple(
        MeasuredGroup(group, tuple(cells)) for group, *cells in zip(groups, *columns, strict=True)
    )
    return Measured(measured, buckets, forward_seconds, gloo, reasons)


class _Side:
    """What a rank needs to measure hooks."""

    def __init__(self, rank: int, planned: PlanningJob) -> None:
        side = RankSide(rank, planned.job, _RANKS)
        self.roles = side.roles
        exact = exact_names(planned.exact, side.parameters, side.roles)
        self.step = side.profile(_Apart(exact))
        buckets = [(bucket.names, bucket.buffer().nbytes) for bucket in self.step.buckets]
        self.groups = group_parameters(buckets, side.parameters, exact, side.roles).groups
        self.first_step = planned.job.first_step
        self.tracer = _Tracer(planned)


_sides: list[_Side] = []  # at most one


def _prepare(
    rank: int, planned: PlanningJob
) -> tuple[Sequence[ParameterGroup], tuple[BucketTrace, ...], float]:
    side = _Side(rank, planned)
    _sides[:] = [side]
    return side.groups, side.step.bucket_traces(), side.step.forward_seconds


@dataclass
class _Apart(CommHook):
    """Wants parameters in ``exact`` in buckets of their own, as the hook ``auto`` does."""

    exact: set[str]

    def bucket_key(self, parameter: str) -> bool:
        return parameter in self.exact


def _measure(rank: int, config: Mapping[str, Any]) -> list[Cell]:  # noqa: ARG001
    side = _sides[0]
    with torch.no_grad():
        return [_measure_group(group, config, side) for group in side.groups]


def _measure_group(group: ParameterGroup, config: Mapping[str, Any], side: _Side) -> Cell:
    together = cast("dist.ProcessGroup", dist.group.WORLD)
    bucket = side.step.buckets[group.bucket]
    part = BucketPart(bucket, [bucket.names.index(name) for name in group.names])
    gradients = part.bucket(0, is_last=True)
    try:
        hook = create(config)
        outcome = _try_hook(hook, gradients, together, side.roles, side.first_step)
        trace = side.tracer.trace(config, gradients, side.roles)
    except CommHookError as error:  # on all ranks alike
        return Cell(refusal=reason_of(error))
    return Cell(outcome.norm, 0.0 if is_lossless(hook) else outcome.error, trace)


def _try_hook(
    hook: CommHook,
    bucket: GradBucket,
    group: dist.ProcessGroup,
    roles: Mapping[str, Role],
    step: int,
) -> Outcome:
    """Average a bucket, which does not change, as in a trial of ``auto``.

    Raises CommHookError if the hook cannot average it.
    """
    trial = Trial(hook)
    trial.prepare(dict(zip(bucket.names, bucket.parameters(), strict=True)), group, roles)
    sample = bucket_with(bucket, bucket.buffer().clone(), step=step)
    comm = Communicator(group, step=step, key=sample.key, seed=0)
    return _finish(trial.run(sample, comm), hook, group)


def _finish(
    coroutine: Coroutine[Any, Any, Outcome], hook: CommHook, group: dist.ProcessGroup
) -> Outcome:
    """Run a trial to its end, one collective after the other."""
    while True:
        try:
            pending = coroutine.send(None)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        if isinstance(pending, Exchange) or pending.members:
            coroutine.close()
            raise CommHookError(
                f"hook {hook!r} cannot be planned: expected a hook that averages among all ranks "
                "in the same step"
            )
        pending.run(group)


class _Tracer:
    """Runs hooks dry on groups, once for groups of the same shapes."""

    def __init__(self, planned: PlanningJob) -> None:
        self._job = planned.job
        self._size = planned.world_size
        known = dry_run_sizes([self._size], self._job.ranks_per_node)
        self._sizes = [self._size] if self._size in known else known
        self._traces: dict[tuple[Any, ...], BucketTrace] = {}

    def trace(
        self, config: Mapping[str, Any], bucket: GradBucket, roles: Mapping[str, Any]
    ) -> BucketTrace:
        """Return what the hook does in a typical step."""
        key = (str(config), tuple(tuple(gradient.shape) for gradient in bucket.gradients()))
        if key not in self._traces:
            self._traces[key] = self._run(config, bucket, roles)
        return self._traces[key]

    def _run(
        self, config: Mapping[str, Any], bucket: GradBucket, roles: Mapping[str, Any]
    ) -> BucketTrace:
        parameters: dict[str, Tensor] = dict(zip(bucket.names, bucket.parameters(), strict=True))
        by_size = {
            size: dry_run(
                config,
                [bucket],
                parameters,
                roles,
                size=size,
                ranks_per_node=self._job.ranks_per_node,
                first_step=self._job.first_step,
            )
            for size in self._sizes
        }
        kinds = DryRuns(by_size, self._job.ranks_per_node).at(self._size)
        _, typical = max(kinds, key=lambda kind: kind[0])
        return typical.buckets[0]
