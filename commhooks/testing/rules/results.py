"""What becomes of gradients."""

import torch

from commhooks.testing.compare import differences, disagreement, layout_of, same_bits
from commhooks.testing.probe import Trainer, draw_gradients
from commhooks.testing.rules.context import (
    DTYPES,
    Site,
    is_lossless,
    not_finite,
    require,
)

__all__ = ["alone", "consensus", "deterministic", "mean", "result", "sizes", "zeros"]


def result(site: Site) -> None:
    """Results are finite, in the dtype, shape, device and memory layout of the gradients."""
    problems = []
    for dtype in DTYPES:
        parameters = site.parameters(dtype)
        trainer = Trainer(site.make_hook(), parameters)
        for step in range(3):
            found = trainer.step(draw_gradients(parameters, site.rank, step))
            problems += not_finite(found)
            for name, gradient in found.items():
                expected = layout_of(parameters[name])
                if layout_of(gradient) != expected:
                    problems.append(f"{name}: expected {expected}, found {layout_of(gradient)}")
    require(not problems, "; ".join(problems))


def sizes(site: Site) -> None:
    """Buckets of any size are reduced, among them of one element and of none."""
    lengths = (129, 5, 1, 0, 64, 3, 2, 31)
    problems = []
    for dtype in (torch.float32, torch.float16):
        parameters = {
            name: torch.zeros(length, dtype=dtype, device=site.device)
            for name, length in zip(site.parameters(), lengths, strict=True)
        }
        hook = site.make_hook()
        trainer = Trainer(hook, parameters, bucket_cap_mb=1e-6)  # one parameter in each bucket
        for step in range(3):
            found = trainer.step(draw_gradients(parameters, site.rank, step))
            problems += site.problems(hook, found, step)
    require(not problems, "; ".join(problems))


def mean(site: Site) -> None:
    """A hook that says lossless = True returns the mean over ranks, up to rounding."""
    problems = []
    for dtype in DTYPES:
        parameters = site.parameters(dtype)
        trainer = Trainer(site.make_hook(), parameters)
        for step in range(3):
            found = trainer.step(draw_gradients(parameters, site.rank, step))
            problems += differences(found, site.mean(parameters, step), site.size)
    require(not problems, "; ".join(problems))


def alone(site: Site) -> None:
    """On one rank nothing is sent, and gradients stay as they are if the hook is lossless."""
    parameters = site.parameters()
    hook = site.make_hook()
    trainer = Trainer(hook, parameters)
    problems = []
    for step in range(3):
        gradients = draw_gradients(parameters, site.rank, step)
        found = trainer.step(gradients)
        problems += not_finite(found)
        if is_lossless(hook) and not same_bits(found, gradients):
            problems.append("expected the gradients unchanged, found other numbers")
    if sent := trainer.handle.stats().total.wire_bytes:
        problems.append(f"expected no bytes sent, found {sent}")
    require(not problems, "; ".join(problems))


def deterministic(site: Site) -> None:
    """Two runs on the same gradients give the same bits."""
    runs = [site.train(steps=3)[0] for _ in range(2)]
    require(same_bits(*runs), "expected two runs to agree bit for bit, found other numbers")


def consensus(site: Site) -> None:
    """All ranks get the same bits (a hook with consensus = False says that they need not)."""
    problem = disagreement(site.train(steps=4)[0])
    require(problem is None, str(problem))


def zeros(site: Site) -> None:
    """Gradients of zeros give zeros."""
    parameters = site.parameters()
    trainer = Trainer(site.make_hook(), parameters)
    problems = []
    for step in range(3):
        found = trainer.step(parameters)
        problems += [
            f"{name} in step {step}: expected zeros, found {g.abs().max()}"
            for name, g in found.items()
            if g.numel() and not (g == 0).all()
        ]
    require(not problems, "; ".join(problems))
