"""Measures a model under hooks, in processes that work side by side and send nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from commhooks.errors import CommHookError
from commhooks.hook import CommHook
from commhooks.models import load_callable, load_model
from commhooks.registry import create
from commhooks.simulation.clones import CloneGroup
from commhooks.simulation.rehearsal import Part, as_launched, rehearse
from commhooks.simulation.rehearsals import Rehearsals
from commhooks.simulation.script import BucketScript, StepScript
from commhooks.simulation.witness import Step, witness

__all__ = ["Subject", "rehearse_hooks"]


@dataclass(frozen=True)
class Subject:
    """What is simulated. ``model`` and ``input``: see :func:`load_model`, :func:`load_callable`.

    Without ``input`` the model needs a method ``example_input()``.
    """

    model: str
    input: str | None = None
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
) -> list[Rehearsals]:
    """What each hook does with the model in worlds of ``sizes``.

    Each rank of the default group finds out for itself, at the same time: what computes at the same
    time shares the memory's bandwidth, as the ranks of a machine do.
    """
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    assert isinstance(alone, dist.ProcessGroup)
    model = load_model(subject.model)
    inputs = _inputs(model, subject)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    steps: dict[tuple[Any, ...], Step] = {}

    def step_of(hook: CommHook) -> Step:
        """Hooks that want the same buckets share it."""
        keys = tuple(hook.bucket_key(name) for name in parameters)
        if keys not in steps:
            steps.clear()  # it may be as large as the model
            dist.barrier()
            steps[keys] = witness(
                model,
                lambda wrapped: _loss(wrapped(*inputs)),
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
        dist.barrier()
        by_size = {
            size: [
                (share, _script(step, parts, is_native=create(config).native(alone) is not None))
                for share, parts in rehearse(
                    config,
                    step.buckets,
                    parameters,
                    size=size,
                    ranks_per_node=subject.ranks_per_node,
                    first_step=subject.first_step,
                )
            ]
            for size in sizes
        }
        found.append(Rehearsals(by_size, subject.ranks_per_node))
    return found


def _script(step: Step, parts: Sequence[Part], *, is_native: bool) -> StepScript:
    """Joins what the engine and what the hook did.

    A native hook's local work is the engine's packing and unpacking, which is in the step already.
    """
    total = sum(bucket.buffer().nbytes for bucket in step.buckets)
    unpacking = max(0.0, step.backward_seconds - step.launches[-1])
    starts = (0.0, *step.launches[:-1])
    buckets = tuple(
        BucketScript(
            gradient_bytes=bucket.buffer().nbytes,
            backward_seconds=launch - start,
            unpack_seconds=unpacking * bucket.buffer().nbytes / max(total, 1),
            local_seconds=tuple(0.0 for _ in part.local_seconds)
            if is_native
            else part.local_seconds,
            collectives=part.collectives,
        )
        for bucket, start, launch, part in zip(
            step.buckets, starts, step.launches, parts, strict=True
        )
    )
    return StepScript(buckets, step.forward_seconds, is_native)


def _inputs(model: nn.Module, subject: Subject) -> tuple[Any, ...]:
    source = (
        load_callable(subject.input) if subject.input else getattr(model, "example_input", None)
    )
    if source is None:
        raise CommHookError(
            f"model {subject.model!r}: expected a method example_input(), or the option --input "
            "with package.module:function, that returns what the model is called with"
        )
    found = source()
    return found if isinstance(found, tuple) else (found,)


def _loss(output: Any) -> Tensor:
    """The output itself where it is a number, else something that all of it has a part in."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else output.square().mean()
    raise CommHookError(
        f"the model returned {type(output).__name__}; expected a tensor, best the loss"
    )
