"""The context in which rules are checked, and the error that a broken rule raises."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.hook.base import CommHook, has_consensus, is_lossless
from commhooks.testing.compare import differences, disagreement, mean_over_ranks
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

__all__ = [
    "DTYPES",
    "BrokenRuleError",
    "Factory",
    "Rule",
    "RuleContext",
    "as_coroutine",
    "has_consensus",
    "is_lossless",
    "not_finite",
    "require",
]

Factory = Callable[[], CommHook]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class BrokenRuleError(AssertionError):
    """A hook breaks a rule; the text says what was expected and what was found."""


@dataclass(frozen=True)
class RuleContext:
    """The context of a check: one rank of ``size``, a factory of the hook, and a device."""

    rank: int
    size: int
    make_hook: Factory
    device: torch.device

    def parameters(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return :func:`probe_parameters` on the device."""
        return probe_parameters(dtype, self.device)

    def train(self, steps: int) -> tuple[dict[str, Tensor], Trainer]:
        """Train with a new hook; return the results of the last step, and the trainer."""
        parameters = self.parameters()
        trainer = Trainer(self.make_hook(), parameters)
        found: dict[str, Tensor] = {}
        for step in range(steps):
            found = trainer.step(draw_gradients(parameters, self.rank, step))
        return found, trainer

    def mean(self, parameters: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return the exact mean over ranks of the gradients of a step."""
        of_ranks = [draw_gradients(parameters, peer, step) for peer in range(self.size)]
        return mean_over_ranks(of_ranks, parameters)

    def problems(self, hook: CommHook, found: Mapping[str, Tensor], step: int) -> list[str]:
        """Describe what is wrong with the results of a step of ``draw_gradients``. A collective."""
        problems = not_finite(found)
        if is_lossless(hook):
            problems += differences(found, self.mean(found, step), self.size)
        if has_consensus(hook) and (problem := disagreement(found)):
            problems.append(problem)
        return problems


Rule = Callable[[RuleContext], None]
"""A rule runs on every rank. Its docstring says what it requires."""


def as_coroutine(hook: CommHook) -> Any:
    """Make the engine call ``reduce`` of the hook, even if there is a version in C++."""
    native = hook.native
    changed: Any = hook
    changed.native = lambda group: native(group) and None
    return changed


def require(holds: bool, message: str) -> None:
    """Raise BrokenRuleError unless the rule ``holds``."""
    if not holds:
        raise BrokenRuleError(message)


def not_finite(found: Mapping[str, Tensor]) -> list[str]:
    """Describe each tensor that is not finite."""
    return [f"{name} is not finite" for name, g in found.items() if not g.isfinite().all()]
