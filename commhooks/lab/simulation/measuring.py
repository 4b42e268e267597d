"""Measures a model with hooks, in processes that compute side by side and send nothing."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from commhooks.cluster import Ranks
from commhooks.costs.dry_runs import DryRuns
from commhooks.costs.step_trace import BucketTrace, StepTrace
from commhooks.errors import reason_of
from commhooks.hook.base import CommHook
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare, roles_of
from commhooks.hook.spec import HookLike, config_of
from commhooks.lab.machine import cores
from commhooks.lab.models import ModelError
from commhooks.lab.simulation.calibration import measure_gloo
from commhooks.lab.simulation.dry_run import HookTrace, as_launched, dry_run
from commhooks.lab.simulation.fake_group import FakeGroup
from commhooks.lab.simulation.measurements import Job, Measurements, hook_key
from commhooks.lab.simulation.profile import StepProfile, profile
from commhooks.lab.simulation.study import BASELINE

__all__ = ["dry_run_hook", "measure", "prepare_dry_runs"]

_TIMEOUT_SECONDS = 1800.0  # for a large model on a small machine


def measure(
    job: Job,
    hooks: Sequence[HookLike],
    sizes: Sequence[int],
    ranks: Ranks | None = None,
) -> Measurements:
    """Measure Gloo, the model and the hooks on this machine, which takes seconds to minutes.

    A hook that cannot be simulated is left out, with the reason. Uses ``ranks``, at least 2, if
    given, else starts processes of its own. If it raises, ``ranks`` cannot be used any more.

    Raises ModelError, and the error of plain averaging if that cannot be simulated.
    """
    busy = min(job.ranks_per_machine, cores())
    if ranks is None:
        with Ranks(max(2, busy), timeout=_TIMEOUT_SECONDS) as own:
            return measure(job, hooks, sizes, own)
    gloo = measure_gloo(ranks)
    ranks(prepare_dry_runs, job, busy)
    dry_runs: dict[str, DryRuns] = {}
    reasons: dict[str, str] = {}
    for config in map(config_of, hooks):
        try:
            dry_runs[hook_key(config)] = ranks(dry_run_hook, config, list(sizes))[0]
        except Exception as error:
            if config == {"name": BASELINE} or isinstance(error, ModelError):
                raise
            reasons[hook_key(config)] = reason_of(error)
            ranks.restart()
            ranks(prepare_dry_runs, job, busy)
    machine = f"{platform.machine()}, {platform.system()}, torch {torch.__version__}"
    return Measurements(machine, job, gloo, dry_runs, reasons)


class _Side:
    """What a rank needs to run hooks dry, and the last profile of the model."""

    def __init__(self, rank: int, job: Job, busy: int) -> None:
        self.job = job
        self._rank = rank
        self._together = dist.new_group(range(busy))
        alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
        assert isinstance(alone, dist.ProcessGroup)
        self.alone = alone
        self.is_busy = rank < busy
        self._model = job.make_module()
        self._batch = job.make_input(self._model, rank)
        self.parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self.roles = roles_of(self._model)
        self._profile: tuple[tuple[Any, ...], StepProfile] | None = None

    def begin_together(self) -> None:
        dist.barrier(self._together)

    def profile(self, hook: CommHook) -> StepProfile:
        """Return the profile that consecutive hooks with the same buckets share."""
        keys = tuple(hook.bucket_key(name) for name in self.parameters)
        if self._profile is None or self._profile[0] != keys:
            self._profile = None  # it may be as large as the model
            self.begin_together()
            step = profile(
                self._model,
                lambda wrapped: self.job.loss(wrapped, self._batch, self._rank),
                hook,
                self.alone,
                bucket_cap_mb=self.job.bucket_cap_mb,
            )
            self._profile = keys, step
        return self._profile[1]


_sides: list[_Side] = []  # at most one


def prepare_dry_runs(rank: int, job: Job, busy: int) -> None:
    """Prepare this rank for :func:`dry_run_hook`.

    The first ``busy`` ranks of the default group measure at the same time, each for itself, so that
    they share the memory's bandwidth as the ranks of a machine do. The other ranks are idle.
    """
    _sides[:] = [_Side(rank, job, busy)]


def dry_run_hook(rank: int, config: Mapping[str, Any], sizes: Sequence[int]) -> DryRuns | None:  # noqa: ARG001
    """Return what a hook does with the model in worlds of ``sizes``; None on idle ranks."""
    side = _sides[0]
    if not side.is_busy:
        return None
    job = side.job
    hook = create(config)
    with as_launched(job.ranks_per_node):
        group = cast("dist.ProcessGroup", FakeGroup(max(sizes)))
        prepare(hook, side.parameters, group, side.roles)
    step = side.profile(hook)
    is_native = create(config).native(side.alone) is not None
    side.begin_together()
    by_size = {
        size: [
            (share, _join(step, traces, is_native=is_native))
            for share, traces in dry_run(
                config,
                step.buckets,
                side.parameters,
                side.roles,
                size=size,
                ranks_per_node=job.ranks_per_node,
                first_step=job.first_step,
                is_timed=not is_native,  # its work is the engine's, which the profile contains
            )
        ]
        for size in sizes
    }
    return DryRuns(by_size, job.ranks_per_node)


def _join(step: StepProfile, traces: Sequence[HookTrace], *, is_native: bool) -> StepTrace:
    """Join the profile of the engine and the traces of the hook."""
    total = sum(bucket.buffer().nbytes for bucket in step.buckets)
    unpacking = max(0.0, step.backward_seconds - step.launches[-1])
    starts = (0.0, *step.launches[:-1])
    buckets = tuple(
        BucketTrace(
            gradient_bytes=bucket.buffer().nbytes,
            backward_seconds=launch - start,
            unpack_seconds=unpacking * bucket.buffer().nbytes / max(total, 1),
            local_seconds=trace.local_seconds,
            collectives=trace.collectives,
            exchanges=trace.exchanges,
        )
        for bucket, start, launch, trace in zip(
            step.buckets, starts, step.launches, traces, strict=True
        )
    )
    return StepTrace(buckets, step.forward_seconds, is_native)
