"""Random trials: what is trained, with which hook, and what goes wrong. A seed gives one trial."""

import random
from dataclasses import dataclass
from typing import Any

import commhooks
from commhooks.hook.base import check_nesting, has_consensus

__all__ = ["ABRUPT", "DELAYS", "IN_HOOK", "Fault", "Trial", "draw"]

Config = dict[str, Any]

_POWERSGD = {"rank": 2, "min_compression_rate": 1.0, "start_step": 0}
# Options that make each hook compress from the first step.
_PLAIN: tuple[Config, ...] = (
    {"name": "allreduce"},
    {"name": "bf16"},
    {"name": "bf16", "two_shot": True},
    {"name": "fp16"},
    {"name": "int8"},
    {"name": "int8", "stochastic": True, "error_feedback": False},
    {"name": "int4"},
    {"name": "int2"},
    {"name": "fp8"},
    {"name": "fp4"},
    {"name": "qsgd"},
    {"name": "terngrad"},
    {"name": "natural"},
    {"name": "onebit"},
    {"name": "signsgd"},
    {"name": "topk", "density": 0.1, "warmup_steps": 0},
    {"name": "threshold", "value": 0.05},
    {"name": "randomk", "density": 0.2},
    {"name": "demo", "density": 0.1, "tile": 8},
    {"name": "dgc", "density": 0.1, "warmup_steps": 2},
    {"name": "powersgd", **_POWERSGD},
    {"name": "powersgd", **_POWERSGD, "two_sided": False},
    {"name": "batched_powersgd", **_POWERSGD},
    {"name": "gossip", "average_every": 3},
    {"name": "push_sum", "topology": "uniform"},
    {"name": "local_sgd", "period": 2},
    {"name": "diloco", "period": 3, "start_step": 2},
    {"name": "diloco", "period": 4, "fragments": 2, "delay": 3, "merge": 0.5, "inner": "int4"},
)

IN_HOOK = ("before", "in", "after")
"""Places of a fault: before the hook reduces a bucket, after its first collective, at its end."""
_PLACES = ("loader", "forward", "backward", "optimizer", *IN_HOOK)
ABRUPT = ("kill", "exit", "kill at any time")
"""The process ends without a Python exception."""
_RAISED = ("ValueError", "SystemExit", "KeyboardInterrupt")
DELAYS = ("slow", "stop")
"""The rank goes on before the timeout."""
_KINDS = (*ABRUPT, *_RAISED, *_RAISED, *DELAYS, "long stop", "nan", "none")


@dataclass(frozen=True)
class Fault:
    """What goes wrong on one rank, in which step and where."""

    kind: str
    rank: int
    step: int
    place: str


@dataclass(frozen=True)
class Trial:
    """One training run."""

    seed: int
    world_size: int
    model: str
    torch_ddp: bool
    options: Config
    """Of the wrapper."""
    hook: Config
    steps: int
    accumulate: int
    """Number of backward passes per step."""
    fault: Fault
    replacement: tuple[int, Config] | None
    """Step, and the hook that is used from there."""
    checkpoint: int | None
    """The step before which a checkpoint is written; a second run resumes from it."""
    is_uneven: bool
    """Whether each rank pauses at random before gradients."""

    @property
    def agrees(self) -> bool:
        """Whether models are the same on all ranks after each step."""
        hooks = [self.hook] + ([self.replacement[1]] if self.replacement else [])
        return all(has_consensus(commhooks.create(hook)) for hook in hooks)


def draw(seed: int) -> Trial:
    """Return the trial of this seed."""
    rng = random.Random(seed)
    world_size = rng.choice((2, 2, 3, 3, 4))
    steps = rng.randint(6, 12)
    model = rng.choice(("mlp", "conv", "embedding", "branches"))
    resumes = rng.random() < 0.2
    torch_ddp = not resumes and rng.random() < 0.3
    options: Config = {
        "bucket_cap_mb": rng.choice((0.001, 0.004, 25)),
        "gradient_as_bucket_view": rng.random() < 0.5,
    }
    if model == "branches":
        options["find_unused_parameters"] = True
    elif not torch_ddp and rng.random() < 0.3:
        options["static_graph"] = True
    if resumes:
        options["stable_buckets"] = True
    hook = _hook(rng, world_size)
    fault = Fault(
        "none" if resumes else rng.choice(_KINDS),
        rng.randrange(world_size),
        rng.randint(1, steps - 3),
        rng.choice(_PLACES),
    )
    accumulate = rng.choice((1, 1, 2))
    replaces = rng.random() < 0.25
    replacement = (rng.randint(1, steps - 2), _hook(rng, world_size)) if replaces else None
    checkpoint = rng.randint(1, steps - 1) if resumes else None
    if not torch_ddp:
        options["host_memory"] = rng.random() < 0.5
    is_uneven = rng.random() < 0.3
    return Trial(
        seed,
        world_size,
        model,
        torch_ddp,
        options,
        hook,
        steps,
        accumulate,
        fault,
        replacement,
        checkpoint,
        is_uneven,
    )


def _hook(rng: random.Random, world_size: int) -> Config:
    """Draw a hook, or a wrapper of hooks, that can be created."""
    while True:
        config = _wrapped(rng, world_size) if rng.random() < 0.4 else rng.choice(_PLAIN)
        try:
            check_nesting(commhooks.create(config))
        except commhooks.CommHookError:
            continue
        return config


def _wrapped(rng: random.Random, world_size: int) -> Config:
    def inner() -> Config:
        return _wrapped(rng, world_size) if rng.random() < 0.2 else rng.choice(_PLAIN)

    kind = rng.choice(
        ("cast", "error_feedback", "hierarchical", "route", "schedule", "skip_nonfinite")
    )
    if kind == "route":
        return {"name": kind, "rules": [["*weight", inner()]], "default": inner()}
    if kind == "schedule":
        return {"name": kind, "stages": [[0, inner()], [rng.randint(1, 5), inner()]]}
    if kind == "hierarchical":
        per_node = rng.choice([n for n in (1, 2) if world_size % n == 0])
        sharded = rng.random() < 0.7
        return {"name": kind, "inner": inner(), "ranks_per_node": per_node, "sharded": sharded}
    return {"name": kind, "inner": inner()}
