"""Measures a model under hooks, in processes that work side by side and send nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from commhooks.costs.step_trace import BucketScript, StepScript
from commhooks.hook.base import CommHook
from commhooks.hook.registry import create
from commhooks.lab import models
from commhooks.lab.simulation.dry_run import Part, as_launched, rehearse
from commhooks.lab.simulation.dry_runs import Rehearsals
from commhooks.lab.simulation.fake_group import CloneGroup
from commhooks.lab.simulation.profile import Step, witness

__all__ = ["Subject", "rehearse_hooks"]


@dataclass(frozen=True)
class Subject(models.Subject):
    """A model, and how it is launched."""

    ranks_per_node: int = 1
    ranks_per_machine: int = 1
    """That will share its memory, as many processes measure at the same time here."""
    bucket_cap_mb: float | None = None
    first_step: int = 1000
    """Of the steps whose mean is predicted: past all warm-ups."""


def rehearse_hooks(
    rank: int,
    subject: Subject,
    configs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    company: int,
) -> list[Rehearsals]:
    """What each hook does with the model in worlds of ``sizes``.

    The first ``company`` ranks of the default group find out, each for itself and at the same time:
    what computes at the same time shares the memory's bandwidth, as the ranks of a machine do. The
    others rest; they return nothing.
    """
    together = dist.new_group(range(company))
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    assert isinstance(alone, dist.ProcessGroup)
    if rank >= company:
        return []
    model = subject.make_module()
    batch = subject.make_input(model, rank)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    steps: dict[tuple[Any, ...], Step] = {}

    def step_of(hook: CommHook) -> Step:
        """Hooks that want the same buckets share it."""
        keys = tuple(hook.bucket_key(name) for name in parameters)
        if keys not in steps:
            steps.clear()  # it may be as large as the model
            dist.barrier(together)
            steps[keys] = witness(
                model,
                lambda wrapped: subject.loss(wrapped, batch, rank),
                hook,
                alone,
                bucket_cap_mb=subject.bucket_cap_mb,
            )
        return steps[keys]

    found = []
    for config in configs:
        hook = create(config)
        with as_launched(subject.ranks_per_node):
            hook.prepare(parameters, cast("dist.ProcessGroup", CloneGroup(max(sizes))))
        step = step_of(hook)
        is_native = create(config).native(alone) is not None
        dist.barrier(together)
        by_size = {
            size: [
                (share, _script(step, parts, is_native=is_native))
                for share, parts in rehearse(
                    config,
                    step.buckets,
                    parameters,
                    size=size,
                    ranks_per_node=subject.ranks_per_node,
                    first_step=subject.first_step,
                    is_timed=not is_native,  # it works with the engine, which is in the step
                )
            ]
            for size in sizes
        }
        found.append(Rehearsals(by_size, subject.ranks_per_node))
    return found


def _script(step: Step, parts: Sequence[Part], *, is_native: bool) -> StepScript:
    """Joins what the engine and what the hook did."""
    total = sum(bucket.buffer().nbytes for bucket in step.buckets)
    unpacking = max(0.0, step.backward_seconds - step.launches[-1])
    starts = (0.0, *step.launches[:-1])
    buckets = tuple(
        BucketScript(
            gradient_bytes=bucket.buffer().nbytes,
            backward_seconds=launch - start,
            unpack_seconds=unpacking * bucket.buffer().nbytes / max(total, 1),
            local_seconds=part.local_seconds,
            collectives=part.collectives,
        )
        for bucket, start, launch, part in zip(
            step.buckets, starts, step.launches, parts, strict=True
        )
    )
    return StepScript(buckets, step.forward_seconds, is_native)
