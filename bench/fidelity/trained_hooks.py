"""The hooks that are compared, at their defaults and used as their docs recommend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import commhooks
from commhooks import CommHook, algorithms

__all__ = ["REFERENCE", "TrainedHook", "trained_hooks"]

REFERENCE = "allreduce"
"""The hook that all others are compared with."""


@dataclass(frozen=True)
class TrainedHook:
    """A hook, the recipe that it is trained with, and the recipe of its reference.

    ``None`` is the task's usual recipe. ``tolerance``: the acceptable relative increase of the
    validation loss over plain averaging. ``warm_up_steps``: steps of plain averaging before the
    hook. ``remark``: how the hook is used, shown after its name. ``name``: of a hook with options
    of its own, shown instead of the hook's.
    """

    hook: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    reference_recipe: str | None = None
    tolerance: float = 0.02
    warm_up_steps: int = 0
    remark: str = ""
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or self.hook

    @property
    def label(self) -> str:
        return f"{self.title} {self._warm_up}" if self.warm_up_steps else self.title

    @property
    def description(self) -> str:
        """Return the hook and how it is used, in Markdown."""
        words = [f"`{self.hook}`", self._warm_up if self.warm_up_steps else self.remark]
        return " ".join(word for word in words if word)

    @property
    def _warm_up(self) -> str:
        return f"after {self.warm_up_steps} plain steps"

    def create(self) -> CommHook:
        """Create the hook."""
        hook = commhooks.create(self.hook, **self.options)
        if self.warm_up_steps:
            stages = [(0, REFERENCE), (self.warm_up_steps, hook)]
            return commhooks.create("schedule", stages=stages)
        return hook


_ONE_BIT_OR_ONE_PERCENT = 0.05
_SPECIAL = [
    # Hooks that need inner hooks, in their most common form.
    TrainedHook("cast", {"inner": "allreduce"}, remark="to bfloat16 around `allreduce`"),
    TrainedHook("error_feedback", {"inner": "bf16"}, remark="around `bf16`"),
    TrainedHook(
        "guard", {"inner": "int4", "max_error": 0.5}, remark="around `int4`, up to an error of 0.5"
    ),
    TrainedHook(
        "hierarchical",
        {"inner": "int8", "ranks_per_node": 2},
        remark="around `int8`, two ranks per node",
    ),
    TrainedHook(
        "route",
        {"rules": [["*bias", "allreduce"]], "default": "powersgd"},
        remark="with biases `allreduce`, the rest `powersgd`",
    ),
    TrainedHook(
        "schedule",
        {"stages": [[0, "allreduce"], [100, "int4"]]},
        remark="with 100 plain steps, then `int4`",
    ),
    TrainedHook("skip_nonfinite", {"inner": "bf16"}, remark="around `bf16`"),
    # These replace the optimizer's momentum.
    TrainedHook(
        "dgc",
        recipe="SGD without momentum",
        reference_recipe="SGD with momentum",
        tolerance=_ONE_BIT_OR_ONE_PERCENT,
        remark="without the optimizer's momentum, against SGD with it",
    ),
    TrainedHook(
        "demo",
        recipe="SGD without momentum, 10 times the rate",
        reference_recipe="SGD with momentum",
        tolerance=_ONE_BIT_OR_ONE_PERCENT,
        remark="without the optimizer's momentum at 10 times the rate, against SGD with it",
    ),
    # With a warm-up, as in the paper of 1-bit Adam.
    TrainedHook("onebit", tolerance=_ONE_BIT_OR_ONE_PERCENT, warm_up_steps=100),
    TrainedHook("signsgd", tolerance=_ONE_BIT_OR_ONE_PERCENT, warm_up_steps=100),
    TrainedHook("topk", tolerance=_ONE_BIT_OR_ONE_PERCENT),
]
_NOT_TRIED = {"auto", "noop", REFERENCE}
"""What auto does depends on the link, and noop sends nothing."""


def trained_hooks() -> list[TrainedHook]:
    """Return one trained per hook, by name, without the reference."""
    special = {trained.hook: trained for trained in _SPECIAL}
    own = {getattr(algorithms, kind).name for kind in algorithms.__all__}
    names = sorted(own - _NOT_TRIED)
    return [special.get(name, TrainedHook(name)) for name in names]
