"""Measures a model and candidates in processes on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.adaptive.candidates import check_candidate
from commhooks.algorithms.adaptive.groups import ParameterGroup, exact_names, group_parameters
from commhooks.cluster import Ranks
from commhooks.costs.dry_runs import DryRuns, dry_run_sizes
from commhooks.costs.gloo import Gloo
from commhooks.costs.step_trace import BucketTrace, StepTrace
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, is_lossless
from commhooks.hook.derived_bucket import BucketPart
from commhooks.hook.registry import create
from commhooks.hook.roles import roles_of
from commhooks.lab.planning.errors import try_hook
from commhooks.lab.simulation.calibration import measure_gloo
from commhooks.lab.simulation.dry_run import dry_run
from commhooks.lab.simulation.measurements import Job
from commhooks.lab.simulation.profile import StepProfile, profile
from commhooks.planning import BucketTimes
from reducer import GradBucket

__all__ = ["Measured", "MeasuredGroup", "PlanningJob", "measure_groups"]

_RANKS = 2
_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class PlanningJob:
    """What to measure: ``configs`` of hooks, and the rules for parameters averaged exactly."""

    job: Job
    configs: tuple[Mapping[str, Any], ...]
    """Plain averaging first."""
    exact: tuple[str, ...]
    world_size: int

    def __post_init__(self) -> None:
        exact_names(self.exact, {}, None)  # raises CommHookOptionError before processes start
        for config in self.configs:
            check_candidate(create(config), "candidates")


@dataclass(frozen=True)
class MeasuredGroup:
    """A group of parameters. Sequences are by hook; None for a hook that cannot average it."""

    names: tuple[str, ...]
    label: str
    bucket: int
    elements: int
    is_exact: bool
    norm: float
    errors: tuple[float | None, ...]
    traces: tuple[BucketTrace | None, ...]
    """Among ``world_size`` ranks."""


@dataclass(frozen=True)
class Measured:
    """The measurements of a job."""

    groups: tuple[MeasuredGroup, ...]
    buckets: tuple[BucketTimes, ...]
    forward_seconds: float
    gloo: Gloo


def measure_groups(job: PlanningJob) -> Measured:
    """Measure with two ranks on this machine, which takes seconds to minutes.

    Raises ModelError, and CommHookError for a candidate that cannot average any group.
    """
    with Ranks(_RANKS, timeout=_TIMEOUT_SECONDS) as ranks:
        gloo = measure_gloo(ranks)
        groups, buckets, forward_seconds = ranks(_measure, job)[0]
    return Measured(groups, buckets, forward_seconds, gloo)


_Result = tuple[tuple[MeasuredGroup, ...], tuple[BucketTimes, ...], float]


def _measure(rank: int, planned: PlanningJob) -> _Result:
    alone = [dist.new_group([other]) for other in range(_RANKS)][rank]
    assert isinstance(alone, dist.ProcessGroup)
    job = planned.job
    model = job.make_module()
    batch = job.make_input(model, rank)
    roles = roles_of(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    exact = exact_names(planned.exact, parameters, roles)
    step = profile(
        model,
        lambda wrapped: job.loss(wrapped, batch, rank),
        _Apart(exact),
        alone,
        bucket_cap_mb=job.bucket_cap_mb,
    )
    buckets = [(bucket.names, bucket.buffer().nbytes) for bucket in step.buckets]
    tracer = _Tracer(planned)
    with torch.no_grad():
        measured = tuple(
            _measure_group(group, step.buckets[group.bucket], planned, tracer, roles)
            for group in group_parameters(buckets, parameters, exact, roles).groups
        )
    return measured, _times(step), step.forward_seconds


@dataclass
class _Apart(CommHook):
    """Wants parameters in ``exact`` in buckets of their own, as the hook ``auto`` does."""

    exact: set[str]

    def bucket_key(self, parameter: str) -> bool:
        return parameter in self.exact


def _measure_group(
    group: ParameterGroup,
    bucket: GradBucket,
    planned: PlanningJob,
    tracer: "_Tracer",
    roles: Mapping[str, Any],
) -> MeasuredGroup:
    together = cast("dist.ProcessGroup", dist.group.WORLD)
    part = BucketPart(bucket, [bucket.names.index(name) for name in group.names])
    gradients = part.bucket(0, is_last=True)
    norm = 0.0
    errors: list[float | None] = []
    traces: list[BucketTrace | None] = []
    for config in planned.configs:
        try:
            hook = create(config)
            outcome = try_hook(hook, gradients, together, roles, planned.job.first_step)
            norm = norm or outcome.norm
            errors.append(0.0 if is_lossless(hook) else outcome.error)
            traces.append(tracer.trace(config, gradients, roles))
        except CommHookError:  # on all ranks alike
            errors[len(traces) :] = [None]
            traces.append(None)
    return MeasuredGroup(
        names=group.names,
        label=group.label,
        bucket=group.bucket,
        elements=group.elements,
        is_exact=group.is_exact,
        norm=norm,
        errors=tuple(errors),
        traces=tuple(traces),
    )


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
            size: [
                (share, _step(traces[0].local_seconds, traces[0].collectives))
                for share, traces in dry_run(
                    config,
                    [bucket],
                    parameters,
                    roles,
                    size=size,
                    ranks_per_node=self._job.ranks_per_node,
                    first_step=self._job.first_step,
                )
            ]
            for size in self._sizes
        }
        kinds = DryRuns(by_size, self._job.ranks_per_node).at(self._size)
        _, typical = max(kinds, key=lambda kind: kind[0])
        return typical.buckets[0]


def _step(local: tuple[float, ...], collectives: Sequence[Any]) -> StepTrace:
    return StepTrace((BucketTrace(0, 0.0, 0.0, local, tuple(collectives)),), 0.0, is_native=False)


def _times(step: StepProfile) -> tuple[BucketTimes, ...]:
    total = sum(bucket.buffer().nbytes for bucket in step.buckets)
    unpacking = max(0.0, step.backward_seconds - step.launches[-1])
    starts = (0.0, *step.launches[:-1])
    return tuple(
        BucketTimes(
            backward_seconds=launch - start,
            unpack_seconds=unpacking * bucket.buffer().nbytes / max(total, 1),
            gradient_bytes=bucket.buffer().nbytes,
        )
        for bucket, start, launch in zip(step.buckets, starts, step.launches, strict=True)
    )
