"""The hooks that are compared: at their defaults, used as their docs recommend, and on the GPT also
with settings of their own.
"""

from dataclasses import dataclass, replace
from typing import Any

import commhooks
from commhooks import CommHook, algorithms
from commhooks.hook.spec import hook_spec

RANKS = 4
REFERENCE = "allreduce"
"""The hook that all others are compared with."""


@dataclass(frozen=True)
class TrainedHook:
    """A hook as on the command line, its recipe, and the recipe of its reference.

    ``None`` is the task's usual recipe. ``tolerance``: the acceptable relative increase of the
    validation loss over plain averaging. ``warm_up_steps``: steps of plain averaging before the
    hook. ``name``: of a variant, shown instead of the hook's. ``ranks``: how many train together.
    """

    spec: str
    recipe: str | None = None
    reference_recipe: str | None = None
    tolerance: float = 0.02
    warm_up_steps: int = 0
    name: str = ""
    ranks: int = RANKS

    @property
    def hook(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def title(self) -> str:
        return self.name or self.hook

    @property
    def label(self) -> str:
        return (self.name or self.spec) + self._warm_up

    @property
    def description(self) -> str:
        """Return the hook, what it is compared with, and their recipes, in Markdown."""
        own, reference = (
            f" ({recipe})" if recipe else "" for recipe in (self.recipe, self.reference_recipe)
        )
        return f"`{self.spec}`{self._warm_up}{own} against plain averaging{reference}"

    @property
    def _warm_up(self) -> str:
        return f" after {self.warm_up_steps} plain steps" if self.warm_up_steps else ""

    @property
    def control(self) -> "TrainedHook | None":
        """The same training on one rank alone, for DiLoCo.

        It has the options, the steps and the data per rank of the hook, and sends nothing. What
        several ranks gain over it is what the exchange is worth, because the outer optimizer
        changes the loss without one too. A node of all ranks is a control itself.
        """
        if self.hook != "diloco" or self.create().to_config()["ranks_per_node"] > 1:
            return None
        return replace(self, ranks=1)

    def key(self, usual: str) -> dict[str, Any]:
        """Return what identifies its runs on a task with this usual recipe, besides the seed."""
        config = self.create().to_config()
        recipe = self.recipe or usual
        return {"hook": self.hook, "config": config, "recipe": recipe, "ranks": self.ranks}

    def create(self) -> CommHook:
        """Create the hook."""
        hook = hook_spec(self.spec).create()
        if self.warm_up_steps:
            stages = [(0, REFERENCE), (self.warm_up_steps, hook)]
            return commhooks.create("schedule", stages=stages)
        return hook


_LOOSE = 0.05  # for one bit per number, and for one percent of the numbers
_MOMENTUM = "SGD with momentum"
_SPECIAL = [
    # Hooks that need inner hooks, in their most common form.
    TrainedHook("cast:inner=allreduce"),
    TrainedHook("error_feedback:inner=bf16"),
    TrainedHook("guard:inner=int4,max_error=0.5"),
    TrainedHook("hierarchical:inner=int8,ranks_per_node=2"),
    TrainedHook('route:rules=[["*bias","allreduce"]],default=powersgd'),
    TrainedHook('schedule:stages=[[0,"allreduce"],[100,"int4"]]'),
    TrainedHook("skip_nonfinite:inner=bf16"),
    # These replace the optimizer's momentum.
    TrainedHook("dgc", "SGD without momentum", _MOMENTUM, _LOOSE),
    TrainedHook("demo", "SGD without momentum, 10 times the rate", _MOMENTUM, _LOOSE),
    # With a warm-up, as in the paper of 1-bit Adam.
    TrainedHook("onebit", tolerance=_LOOSE, warm_up_steps=100),
    TrainedHook("signsgd", tolerance=_LOOSE, warm_up_steps=100),
    TrainedHook("topk", tolerance=_LOOSE),
]
_NOT_TRIED = {"auto", "noop", REFERENCE}
"""Hooks without figures: auto depends on the link, and noop sends nothing."""


def trained_hooks() -> list[TrainedHook]:
    """Return one trained per hook, by name, without the reference."""
    special = {trained.hook: trained for trained in _SPECIAL}
    names = sorted(algorithms.HOOKS.keys() - _NOT_TRIED)
    return [special.get(name, TrainedHook(name)) for name in names]


_E3M0 = '{"name":"fp4","format":"e3m0","error_feedback":false}'
_CHUNKS = '"chunk":4096,"density":0.015625,"bits":2,"warmup_steps":0,"error_feedback":false'
_SPARSE = f'{{"name":"error_feedback","decay":0.95,"inner":{{"name":"topk",{_CHUNKS}}}}}'
_DELAYED = "fragments=5,delay=5,merge=0.5,outer_lr=0.4"
_IN_CHUNKS = "topk:chunk=4096,density={},bits={},warmup_steps=0"
_ONE_WORKER = f"diloco:ranks_per_node={RANKS}"
_LESS_MOMENTUM = f"diloco:outer_momentum=0.5,ranks_per_node={RANKS}"

_VARIANTS = [
    # The recipes of docs/hooks/diloco.md, all with the same period: 1,000 steps are 33 of 30 steps.
    # DiLoCo itself is the hook's default.
    TrainedHook("diloco:inner=int8", name="INTELLECT-1"),
    TrainedHook(f"diloco:inner={_E3M0},{_DELAYED}", name="Streaming DiLoCo"),
    TrainedHook("diloco:inner=int2", "Muon", name="MuLoCo"),
    TrainedHook(f"diloco:outer_lr=1.0,outer_momentum=0.0,inner={_SPARSE}", name="SparseLoCo"),
    TrainedHook("diloco:inner=int4", name="diloco with int4"),
    TrainedHook("diloco:outer_momentum=0.5,inner=int4", "Muon", name="diloco with int4 and Muon"),
    # A thirtieth of the bytes. Of the options tried on seed 3 the best, see docs/hooks/diloco.md.
    TrainedHook("diloco:period=4,outer_momentum=0.5,inner=int4", name="diloco with int4, period 4"),
    # One worker with the data of all ranks, whose gradients are averaged in every step: what the
    # outer optimizer alone does, without any byte saved (GPA, arXiv:2512.17131).
    TrainedHook(_ONE_WORKER, name="one-worker DiLoCo"),
    TrainedHook(_LESS_MOMENTUM, name="one-worker DiLoCo, momentum 0.5"),
    TrainedHook(_LESS_MOMENTUM, "Muon", name="one-worker DiLoCo with Muon"),
    TrainedHook(REFERENCE, "Muon", name="plain averaging with Muon"),
    # What a rank reaches that sends nothing and has no outer optimizer.
    TrainedHook(REFERENCE, name="one rank alone", ranks=1),
    TrainedHook(REFERENCE, "Muon", name="one rank alone with Muon", ranks=1),
    TrainedHook("demo:sign=true,decay=0.95", "SGD for signs", name="demo with signs"),
    TrainedHook(_IN_CHUNKS.format(1 / 64, 2), name="topk in chunks, 2 bits"),
    # About a thirtieth of the bytes, in every step.
    TrainedHook(_IN_CHUNKS.format(3 / 64, 4), name="topk in chunks, 4 bits"),
    TrainedHook("powersgd:rank=2", name="powersgd, rank 2"),
]

# The headline's hooks, the most useful figures first. int2 and terngrad are those with the lowest
# loss on gpt among all that send less than int4 in every step.
_ON_LANGUAGE = (
    *("noop", "int4", "bf16", "int8", "terngrad", "int2"),
    *("powersgd", "onebit", "topk", "diloco"),
)


def trained_on(task: str) -> list[TrainedHook]:
    """Return the hooks at their defaults, and on the GPT also the variants."""
    if task == "language":
        usual = {trained.hook: trained for trained in trained_hooks()}
        return [usual.get(name, TrainedHook(name)) for name in _ON_LANGUAGE]
    return [*trained_hooks(), *(_VARIANTS if task == "gpt" else [])]
