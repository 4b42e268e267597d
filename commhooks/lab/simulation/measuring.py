"""Measures a model with hooks, in processes that compute side by side and send nothing."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from commhooks.cluster import Ranks
from commhooks.costs.dry_runs import DryRuns
from commhooks.costs.step_trace import BucketTrace, StepTrace
from commhooks.hook.base import CommHook
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare, roles_of
from commhooks.lab.machine import cores
from commhooks.lab.simulation.calibration import measure_gloo
from commhooks.lab.simulation.dry_run import HookTrace, as_launched, dry_run
from commhooks.lab.simulation.fake_group import FakeGroup
from commhooks.lab.simulation.measurements import Job, Measurements, hook_key
from commhooks.lab.simulation.profile import StepProfile, profile

__all__ = ["dry_run_hooks", "measure"]

_TIMEOUT_SECONDS = 1800.0  # for a large model on a small machine


def measure(
    job: Job,
    configs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    ranks: Ranks | None = None,
) -> Measurements:
    """Measure Gloo, the model and the hooks on this machine, which takes seconds to minutes.

    Uses ``ranks``, at least 2, if given, else starts processes of its own. If it raises, ``ranks``
    cannot be used any more.

    Raises ModelError, and CommHookError for a hook that cannot be simulated.
    """
    busy = min(job.ranks_per_machine, cores())
    if ranks is None:
        with Ranks(max(2, busy), timeout=_TIMEOUT_SECONDS) as own:
            return measure(job, configs, sizes, own)
    gloo = measure_gloo(ranks)
    found = ranks(dry_run_hooks, job, list(configs), list(sizes), busy)[0]
    dry_runs = {hook_key(config): runs for config, runs in zip(configs, found, strict=True)}
    machine = f"{platform.machine()}, {platform.system()}, torch {torch.__version__}"
    return Measurements(machine, job, gloo, dry_runs)


def dry_run_hooks(
    rank: int,
    job: Job,
    configs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    busy: int,
) -> list[DryRuns]:
    """Return what each hook does with the model in worlds of ``sizes``.

    The first ``busy`` ranks of the default group measure at the same time, each for itself, so that
    they share the memory's bandwidth as the ranks of a machine do. The other ranks are idle and
    return an empty list.
    """
    together = dist.new_group(range(busy))
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    assert isinstance(alone, dist.ProcessGroup)
    if rank >= busy:
        return []
    model = job.make_module()
    batch = job.make_input(model, rank)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    roles = roles_of(model)
    profiles: dict[tuple[Any, ...], StepProfile] = {}

    def profile_for(hook: CommHook) -> StepProfile:
        """Return the profile that consecutive hooks with the same buckets share."""
        keys = tuple(hook.bucket_key(name) for name in parameters)
        if keys not in profiles:
            profiles.clear()  # a profile may be as large as the model
            dist.barrier(together)
            profiles[keys] = profile(
                model,
                lambda wrapped: job.loss(wrapped, batch, rank),
                hook,
                alone,
                bucket_cap_mb=job.bucket_cap_mb,
            )
        return profiles[keys]

    found = []
    for config in configs:
        hook = create(config)
        with as_launched(job.ranks_per_node):
            prepare(hook, parameters, cast("dist.ProcessGroup", FakeGroup(max(sizes))), roles)
        step = profile_for(hook)
        is_native = create(config).native(alone) is not None
        dist.barrier(together)
        by_size = {
            size: [
                (share, _join(step, traces, is_native=is_native))
                for share, traces in dry_run(
                    config,
                    step.buckets,
                    parameters,
                    roles,
                    size=size,
                    ranks_per_node=job.ranks_per_node,
                    first_step=job.first_step,
                    is_timed=not is_native,  # its work is the engine's, which the profile contains
                )
            ]
            for size in sizes
        }
        found.append(DryRuns(by_size, job.ranks_per_node))
    return found


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
