"""Which hooks are tried, and how: at their defaults, in the way that their docs ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import commhooks
from commhooks import CommHook, algorithms

__all__ = ["REFERENCE", "Subject", "subjects"]

REFERENCE = "allreduce"
"""The hook that all are compared with."""


@dataclass(frozen=True)
class Subject:
    """A hook, the recipe of the task that it is used with, and the one of its reference.

    ``None`` is the task's usual recipe. ``tolerance``: how much more validation loss than plain
    averaging is acceptable, as a share of that. ``warm_up_steps``: of plain averaging before it.
    ``remark``: on how the hook is used, after its name.
    """

    hook: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    reference_recipe: str | None = None
    tolerance: float = 0.02
    warm_up_steps: int = 0
    remark: str = ""

    @property
    def label(self) -> str:
        return f"{self.hook} {self._warm_up}" if self.warm_up_steps else self.hook

    @property
    def description(self) -> str:
        """For tables, in Markdown: the hook, and what it is used with."""
        words = [f"`{self.hook}`", self._warm_up if self.warm_up_steps else self.remark]
        return " ".join(word for word in words if word)

    @property
    def _warm_up(self) -> str:
        return f"after {self.warm_up_steps} plain steps"

    def create(self) -> CommHook:
        """The hook, as a new object."""
        hook = commhooks.create(self.hook, **self.options)
        if self.warm_up_steps:
            stages = [(0, REFERENCE), (self.warm_up_steps, hook)]
            return commhooks.create("schedule", stages=stages)
        return hook


_ONE_BIT_OR_ONE_PERCENT = 0.05
_SPECIAL = [
    # Hooks that need others to do something, in their most common form.
    Subject("cast", {"inner": "allreduce"}, remark="to bfloat16 around `allreduce`"),
    Subject("error_feedback", {"inner": "bf16"}, remark="around `bf16`"),
    Subject(
        "hierarchical",
        {"inner": "int8", "ranks_per_node": 2},
        remark="around `int8`, two ranks per node",
    ),
    Subject(
        "route",
        {"rules": [["*bias", "allreduce"]], "default": "powersgd"},
        remark="with biases `allreduce`, the rest `powersgd`",
    ),
    Subject(
        "schedule",
        {"stages": [[0, "allreduce"], [100, "int4"]]},
        remark="with 100 plain steps, then `int4`",
    ),
    Subject("skip_nonfinite", {"inner": "bf16"}, remark="around `bf16`"),
    # Takes over the optimizer's momentum.
    Subject(
        "dgc",
        recipe="SGD without momentum",
        reference_recipe="SGD with momentum",
        tolerance=_ONE_BIT_OR_ONE_PERCENT,
        remark="without the optimizer's momentum, against SGD with it",
    ),
    # Warm up, as in the paper of 1-bit Adam.
    Subject("onebit", tolerance=_ONE_BIT_OR_ONE_PERCENT, warm_up_steps=100),
    Subject("signsgd", tolerance=_ONE_BIT_OR_ONE_PERCENT, warm_up_steps=100),
    Subject("topk", tolerance=_ONE_BIT_OR_ONE_PERCENT),
]
_NOT_TRIED = {"noop", REFERENCE}  # noop sends nothing


def subjects() -> list[Subject]:
    """One of each hook, by name, without the reference."""
    special = {subject.hook: subject for subject in _SPECIAL}
    own = {getattr(algorithms, kind).name for kind in algorithms.__all__}
    names = sorted(own - _NOT_TRIED)
    return [special.get(name, Subject(name)) for name in names]
