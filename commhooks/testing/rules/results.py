"""Rules for the results of a hook."""

from collections.abc import Iterator

import torch
from torch import Tensor

from commhooks.testing.compare import differences, disagreement, layout_of, same_bits
from commhooks.testing.probe import Trainer, draw_gradients
from commhooks.testing.rules.context import (
    DTYPES,
    RuleContext,
    is_lossless,
    not_finite,
    require,
)

__all__ = ["alone", "consensus", "deterministic", "mean", "result", "sizes", "zeros"]


def result(context: RuleContext) -> None:
    """Return finite results with the dtype, shape, device and memory layout of the gradients."""
    problems = []
    for parameters, _, found in _steps(context):
        problems += not_finite(found)
        for name, gradient in found.items():
            expected = layout_of(parameters[name])
            if layout_of(gradient) != expected:
                problems.append(f"{name}: expected {expected}, found {layout_of(gradient)}")
    require(not problems, "; ".join(problems))


def sizes(context: RuleContext) -> None:
    """Reduce buckets of any size, including those of one element or none."""
    lengths = (129, 5, 1, 0, 64, 3, 2, 31)
    problems = []
    for dtype in (torch.float32, torch.float16):
        parameters = {
            name: torch.zeros(length, dtype=dtype, device=context.device)
            for name, length in zip(context.parameters(), lengths, strict=True)
        }
        hook = context.make_hook()
        trainer = Trainer(hook, parameters, bucket_cap_mb=1e-6)  # one parameter in each bucket
        for step in range(3):
            found = trainer.step(draw_gradients(parameters, context.rank, step))
            problems += context.problems(hook, found, step)
    require(not problems, "; ".join(problems))


def mean(context: RuleContext) -> None:
    """Return the mean over ranks, up to rounding, if lossless = True."""
    problems = []
    for parameters, step, found in _steps(context):
        problems += differences(found, context.mean(parameters, step), context.size)
    require(not problems, "; ".join(problems))


def alone(context: RuleContext) -> None:
    """Send nothing on one rank, and leave gradients unchanged if lossless = True."""
    parameters = context.parameters()
    hook = context.make_hook()
    trainer = Trainer(hook, parameters)
    problems = []
    for step in range(3):
        gradients = draw_gradients(parameters, context.rank, step)
        found = trainer.step(gradients)
        problems += not_finite(found)
        if is_lossless(hook) and not same_bits(found, gradients):
            problems.append("expected unchanged gradients, found other numbers")
    if sent := trainer.handle.stats().total.wire_bytes:
        problems.append(f"expected no bytes sent, found {sent}")
    require(not problems, "; ".join(problems))


def deterministic(context: RuleContext) -> None:
    """Return the same bits for the same gradients."""
    runs = [context.train(steps=3)[0] for _ in range(2)]
    require(same_bits(*runs), "expected two runs to agree bit for bit, found other numbers")


def consensus(context: RuleContext) -> None:
    """Return the same bits on all ranks, unless consensus = False."""
    problem = disagreement(context.train(steps=4)[0])
    require(problem is None, str(problem))


def zeros(context: RuleContext) -> None:
    """Return zeros for zero gradients."""
    parameters = context.parameters()
    trainer = Trainer(context.make_hook(), parameters)
    problems = []
    for step in range(3):
        found = trainer.step(parameters)
        problems += [
            f"{name} in step {step}: expected zeros, found {g.abs().max()}"
            for name, g in found.items()
            if g.numel() and not (g == 0).all()
        ]
    require(not problems, "; ".join(problems))


def _steps(context: RuleContext) -> Iterator[tuple[dict[str, Tensor], int, dict[str, Tensor]]]:
    """Yield the parameters, the number and the results of three steps, for each dtype."""
    for dtype in DTYPES:
        parameters = context.parameters(dtype)
        trainer = Trainer(context.make_hook(), parameters)
        for step in range(3):
            yield parameters, step, trainer.step(draw_gradients(parameters, context.rank, step))
