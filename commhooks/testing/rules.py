"""What every hook has to keep to, one function per rule.

Each runs on every rank, and raises :class:`BrokenRuleError` only after its last collective, so that
no rank is left waiting for one that has already found out.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks.hook import CommHook
from commhooks.testing.compare import (
    differences,
    disagreement,
    layout_of,
    mean_over_ranks,
    same_bits,
    through_file,
)
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

__all__ = ["RULES", "BrokenRuleError", "Factory", "Site"]

Factory = Callable[[], CommHook]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class BrokenRuleError(AssertionError):
    """What was expected and what was found."""


@dataclass(frozen=True)
class Site:
    """Where a rule is checked: one rank of ``size``, with a maker of hooks."""

    rank: int
    size: int
    make_hook: Factory

    def train(self, steps: int) -> tuple[dict[str, Tensor], Trainer]:
        """Trains a new hook; the results of the last step."""
        parameters = probe_parameters()
        trainer = Trainer(self.make_hook(), parameters)
        found: dict[str, Tensor] = {}
        for step in range(steps):
            found = trainer.step(draw_gradients(parameters, self.rank, step))
        return found, trainer

    def mean(self, parameters: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """The exact mean over ranks of the gradients of that step."""
        of_ranks = [draw_gradients(parameters, peer, step) for peer in range(self.size)]
        return mean_over_ranks(of_ranks, parameters)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise BrokenRuleError(message)


def not_finite(found: Mapping[str, Tensor]) -> list[str]:
    return [f"{name} is not finite" for name, g in found.items() if not g.isfinite().all()]


# ------------------------------------------------------------------------- names and descriptions


def registered(site: Site) -> None:
    """The hook can be made by its name, so the class carries @register_hook("name")."""
    kind = type(site.make_hook())
    names = commhooks.available()
    require(
        kind.name in names,
        f"expected the name of {kind.__name__} among {names}, found {kind.name!r}",
    )
    found = type(commhooks.create(kind.name))
    require(found is kind, f"expected create({kind.name!r}) to make a {kind}, found {found}")


def config(site: Site) -> None:
    """The hook is rebuilt equal from its to_config() after that went through JSON."""
    hook = site.make_hook()
    try:
        stored = json.loads(json.dumps(hook.to_config()))
    except TypeError as error:
        raise BrokenRuleError(f"{hook.to_config()} cannot be written as JSON: {error}") from error
    found = commhooks.create(stored)
    require(found == hook, f"expected {hook!r} from {stored}, found {found!r}")


def representation(site: Site) -> None:
    """repr(hook) is source that makes an equal hook."""
    hook = site.make_hook()
    try:
        found = eval(repr(hook), {type(hook).__name__: type(hook), "torch": torch})
    except Exception as error:
        raise BrokenRuleError(f"{hook!r} is no valid source: {error}") from error
    require(found == hook, f"expected the source {hook!r} to make that hook, found {found!r}")


# ------------------------------------------------------------------------------------- results


def result(site: Site) -> None:
    """Results are finite, in the dtype, shape, device and memory layout of the gradients."""
    problems = []
    for dtype in DTYPES:
        parameters = probe_parameters(dtype)
        trainer = Trainer(site.make_hook(), parameters)
        for step in range(3):
            found = trainer.step(draw_gradients(parameters, site.rank, step))
            problems += not_finite(found)
            for name, gradient in found.items():
                expected = layout_of(parameters[name])
                if layout_of(gradient) != expected:
                    problems.append(f"{name}: expected {expected}, found {layout_of(gradient)}")
    require(not problems, "; ".join(problems))


def mean(site: Site) -> None:
    """A hook that says lossless = True returns the mean over ranks, up to rounding."""
    problems = []
    for dtype in DTYPES:
        parameters = probe_parameters(dtype)
        trainer = Trainer(site.make_hook(), parameters)
        for step in range(3):
            found = trainer.step(draw_gradients(parameters, site.rank, step))
            problems += differences(found, site.mean(parameters, step), site.size)
    require(not problems, "; ".join(problems))


def alone(site: Site) -> None:
    """On one rank a hook that says lossless = True changes nothing."""
    parameters = probe_parameters()
    gradients = draw_gradients(parameters, site.rank, 0)
    found = Trainer(site.make_hook(), parameters).step(gradients)
    require(same_bits(found, gradients), "expected the gradients unchanged, found other numbers")


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
    parameters = probe_parameters()
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


# --------------------------------------------------------------------------------------- state


def non_finite(site: Site) -> None:
    """Where a gradient of one rank is not finite, results show it and no rank's state changes.

    Within a bucket: others are reduced before the number is seen, or know nothing of it. With
    consensus = False other ranks may know nothing of it either, but no state may take it in.
    """
    parameters = probe_parameters()
    hook = site.make_hook()
    trainer = Trainer(hook, parameters, bucket_cap_mb=25)
    for step in range(2):
        trainer.step(draw_gradients(parameters, site.rank, step))
    before = through_file(hook.state_dict())
    gradients = draw_gradients(parameters, site.rank, 2)
    if site.rank == site.size - 1:
        gradients["matrix"][3, 4] = torch.inf
    bad = trainer.step(gradients)
    found = hook.state_dict()
    is_kept = same_bits(found, before) if hook.consensus else _is_finite(found)
    after = trainer.step(draw_gradients(parameters, site.rank, 3))
    require(
        is_kept,
        "expected state_dict() as it was before a gradient of inf, found it changed"
        if hook.consensus
        else "expected a finite state_dict() after a gradient of inf, found one that is not",
    )
    require(
        not hook.consensus or len(not_finite(bad)) > 0,
        "expected a result that is not finite, so that a gradient scaler notices; found none",
    )
    require(not not_finite(after), f"in the step after a gradient of inf: {not_finite(after)}")


def _is_finite(state: Any) -> bool:
    """Of nested dicts of tensors, as state_dict() gives them."""
    if isinstance(state, Mapping):
        return all(map(_is_finite, state.values()))
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def resume(site: Site) -> None:
    """Training goes on bit for bit from a saved state_dict()."""
    parameters = probe_parameters()
    trainer = Trainer(site.make_hook(), parameters, stable_buckets=True)
    for step in range(3):
        trainer.step(draw_gradients(parameters, site.rank, step))
    resumed = Trainer(site.make_hook(), parameters, stable_buckets=True)
    resumed.handle.load_state_dict(through_file(trainer.handle.state_dict()))
    changed = []
    for step in range(3, 6):
        gradients = draw_gradients(parameters, site.rank, step)
        if not same_bits(trainer.step(gradients), resumed.step(gradients)):
            changed.append(step)
    require(
        not changed,
        f"expected the same numbers with and without a restart, found others in steps {changed}; "
        "whatever a later step depends on has to be in `state`",
    )


# ---------------------------------------------------------------------------------- the engine


def wire(site: Site) -> None:
    """Something is sent, and as many bytes by every rank."""
    _, trainer = site.train(steps=2)
    of_ranks: list[Any] = [None] * site.size
    dist.all_gather_object(of_ranks, trainer.handle.stats().total.wire_bytes)
    require(
        all(of_ranks) and len(set(of_ranks)) == 1,
        f"expected the same number of bytes above zero on every rank, found {of_ranks}",
    )


def unused(site: Site) -> None:
    """Parameters that some or all ranks do not use, and backwards under no_sync(), do no harm."""
    parameters = probe_parameters()
    used = {name: tensor for name, tensor in parameters.items() if name != "spare"}
    used_by_first = {name: tensor for name, tensor in used.items() if name != "vector"}
    hook = site.make_hook()
    trainer = Trainer(hook, parameters, find_unused_parameters=True)
    found: dict[str, Tensor] = {}
    problems = []
    for step in range(3):
        accumulated, last = (
            [draw_gradients(used if r else used_by_first, r, step, i) for r in range(site.size)]
            for i in range(2)
        )
        found = trainer.step(last[site.rank], before=[accumulated[site.rank]])
        problems += not_finite(found)
        if "spare" in found:
            problems.append("expected no gradient for a parameter that no rank used, found one")
        if hook.lossless:
            sums = [
                {name: one[name] + two[name] for name in one}
                for one, two in zip(accumulated, last, strict=True)
            ]
            problems += differences(found, mean_over_ranks(sums, used), 2 * site.size)
    if hook.consensus and (problem := disagreement(found)):
        problems.append(problem)
    require(not problems, "; ".join(problems))


def failure(site: Site) -> None:
    """If the hook raises on one rank, none hangs, and the next step is sound on all."""
    parameters = probe_parameters()
    hook: Any = site.make_hook()
    hook.native = lambda _group: None  # so that the engine calls `reduce`
    trainer = Trainer(hook, parameters)
    trainer.step(draw_gradients(parameters, site.rank, 0))

    async def fail(*_: object) -> Tensor:
        raise ValueError("raised by the conformance kit")

    reduce = hook.reduce
    hook.reduce = fail if site.rank == 0 else reduce
    raised = None
    try:
        trainer.step(draw_gradients(parameters, site.rank, 1))
    except Exception as error:
        raised = error
    hook.reduce = reduce
    found = trainer.step(draw_gradients(parameters, site.rank, 2))
    problem = disagreement(found) if hook.consensus else None
    require(
        site.rank != 0 or raised is not None,
        "expected backward() to raise what the hook raised, found that it did not",
    )
    require(not not_finite(found), f"in the step after a failure: {not_finite(found)}")
    require(problem is None, f"in the step after a failure: {problem}")


def stock(site: Site) -> None:
    """The hook works on torch.nn.parallel.DistributedDataParallel as well."""
    parameters = probe_parameters()
    hook = site.make_hook()
    trainer = Trainer(hook, parameters, stock=True)
    found: dict[str, Tensor] = {}
    problems = []
    for step in range(3):
        found = trainer.step(draw_gradients(parameters, site.rank, step))
        problems += not_finite(found)
        if hook.lossless:
            problems += differences(found, site.mean(parameters, step), site.size)
    if hook.consensus and (problem := disagreement(found)):
        problems.append(problem)
    require(not problems, "; ".join(problems))


RULES: Mapping[str, Callable[[Site], None]] = {
    rule.__name__: rule
    for rule in (
        registered,
        config,
        representation,
        result,
        mean,
        alone,
        deterministic,
        consensus,
        zeros,
        non_finite,
        resume,
        wire,
        unused,
        failure,
        stock,
    )
}
