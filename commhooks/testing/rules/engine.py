"""Rules for how a hook works with the engine and the wrapper."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.testing.compare import differences, disagreement, mean_over_ranks
from commhooks.testing.probe import Trainer, draw_gradients
from commhooks.testing.rules.context import (
    RuleContext,
    as_coroutine,
    has_consensus,
    is_lossless,
    not_finite,
    require,
)
from reducer import GradBucket

__all__ = ["cost", "failure", "torch_ddp", "unused", "wire"]


_COST_STEPS = 3


def wire(context: RuleContext) -> None:
    """Send through the communicator, on every rank."""
    _, trainer = context.train(steps=2)
    of_ranks: list[Any] = [None] * context.size
    dist.all_gather_object(of_ranks, trainer.handle.stats().total.wire_bytes)
    require(
        all(of_ranks),
        f"expected bytes sent by every rank, found {of_ranks}",
    )


def cost(context: RuleContext) -> None:
    """Send the bytes that wire_bytes() returns, unless it returns None."""
    hook = as_coroutine(context.make_hook())
    reduce = hook.reduce
    expected: dict[tuple[str, ...], list[int | None]] = {}

    async def note(bucket: GradBucket, comm: Communicator) -> Tensor:
        expected.setdefault(tuple(bucket.names), []).append(hook.wire_bytes(bucket, comm.size))
        average: Tensor = await reduce(bucket, comm)
        return average

    hook.reduce = note
    parameters = context.parameters()
    trainer = Trainer(hook, parameters, stable_buckets=True)
    for step in range(_COST_STEPS):
        trainer.step(draw_gradients(parameters, context.rank, step))
    trainer.handle.adapter.flush()  # exchanges send as well
    problems = [
        f"{bucket.names}: wire_bytes() returned {of_steps} in {_COST_STEPS} steps, but "
        f"{bucket.wire_bytes * _COST_STEPS:.0f} bytes were sent"
        for bucket in trainer.handle.stats().buckets
        if None not in (of_steps := expected[bucket.names])
        and bucket.wire_bytes is not None
        and round(bucket.wire_bytes * _COST_STEPS) != sum(filter(None, of_steps))
    ]
    require(not problems, "; ".join(problems))


def unused(context: RuleContext) -> None:
    """Accept parameters that some or all ranks do not use, and backwards under no_sync()."""
    parameters = context.parameters()
    used = {name: tensor for name, tensor in parameters.items() if name != "spare"}
    used_by_first = {name: tensor for name, tensor in used.items() if name != "vector"}
    hook = context.make_hook()
    trainer = Trainer(hook, parameters, find_unused_parameters=True)
    found: dict[str, Tensor] = {}
    problems = []
    for step in range(3):
        accumulated, last = (
            [draw_gradients(used if r else used_by_first, r, step, i) for r in range(context.size)]
            for i in range(2)
        )
        found = trainer.step(last[context.rank], before=[accumulated[context.rank]])
        problems += not_finite(found)
        if "spare" in found:
            problems.append("expected no gradient for a parameter that no rank used, found one")
        if is_lossless(hook):
            sums = [
                {name: one[name] + two[name] for name in one}
                for one, two in zip(accumulated, last, strict=True)
            ]
            problems += differences(found, mean_over_ranks(sums, used), 2 * context.size)
    if has_consensus(hook) and (problem := disagreement(found)):
        problems.append(problem)
    require(not problems, "; ".join(problems))


def failure(context: RuleContext) -> None:
    """Let no rank hang if the hook raises on one, and take the next step correctly on all."""
    parameters = context.parameters()
    hook = as_coroutine(context.make_hook())
    trainer = Trainer(hook, parameters)
    trainer.step(draw_gradients(parameters, context.rank, 0))

    async def fail(*_: object) -> Tensor:
        raise ValueError("raised by the conformance kit")

    reduce = hook.reduce
    hook.reduce = fail if context.rank == 0 else reduce
    raised = None
    try:
        trainer.step(draw_gradients(parameters, context.rank, 1))
    except Exception as error:
        raised = error
    hook.reduce = reduce
    if dist.get_backend() == "nccl" and context.size > 1:
        trainer.handle.replace(hook)  # Note [Failures on NCCL] in comm/stream_groups.py
    found = trainer.step(draw_gradients(parameters, context.rank, 2))
    problem = disagreement(found) if has_consensus(hook) else None
    require(
        context.rank != 0 or raised is not None,
        "expected backward() to raise the error of the hook, found that it did not",
    )
    require(not not_finite(found), f"in the step after a failure: {not_finite(found)}")
    require(problem is None, f"in the step after a failure: {problem}")


def torch_ddp(context: RuleContext) -> None:
    """Work on torch.nn.parallel.DistributedDataParallel."""
    parameters = context.parameters()
    hook = context.make_hook()
    trainer = Trainer(hook, parameters, torch_ddp=True)
    problems = []
    for step in range(3):
        found = trainer.step(draw_gradients(parameters, context.rank, step))
        problems += context.problems(hook, found, step)
    require(not problems, "; ".join(problems))
