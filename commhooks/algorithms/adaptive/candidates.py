"""The hooks that plans choose from, and their specs in plans."""

from typing import Any

from commhooks.errors import CommHookOptionError
from commhooks.hook.base import CommHook, has_consensus, tree
from commhooks.hook.registry import declared_candidates
from commhooks.hook.spec import hook_spec

__all__ = [
    "DEFAULT_CANDIDATES",
    "check_candidate",
    "default_candidates",
    "default_specs",
    "hook_of_spec",
]

DEFAULT_CANDIDATES = (
    "allreduce",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "powersgd:rank=2,start_step=0",
    "powersgd:rank=4,start_step=0",
    "powersgd:rank=8,start_step=0",
    "topk:density=0.01,warmup_steps=0",
    "topk:density=0.05,warmup_steps=0",
)
"""The exact one first. Without warm-ups, during which a hook has another error and other bytes."""
_CHOOSERS = {"auto", "guard"}


def default_specs() -> list[str]:
    """Return the hooks that are considered unless the user names others.

    Among them are those of other packages that declare themselves, with their default options.
    """
    return [*DEFAULT_CANDIDATES, *declared_candidates()]


def default_candidates() -> list[CommHook]:
    """Return new hooks of :func:`default_specs`."""
    return [hook_spec(spec).create() for spec in default_specs()]


def hook_of_spec(value: Any) -> Any:
    """Return the hook of a spec with options, such as "powersgd:rank=4"; other values as is."""
    if isinstance(value, str) and ":" in value:
        return hook_spec(value).create()
    return value


def check_candidate(hook: CommHook, where: str) -> None:
    """Raise CommHookOptionError unless parameters may move from and to the hook at any step.

    ``where``: what the user has set to this hook.
    """
    problem = ""
    if not has_consensus(hook):
        problem = "does not return the same on all ranks"
    elif hook.changes_parameters:
        problem = "changes parameters"
    elif any(each.skips_steps for each in tree(hook)):
        problem = "skips steps of the training loop"
    elif any(each.spreads_parameters for each in tree(hook)):
        problem = "keeps state of other parameters on other ranks"
    elif hook.has_exchanges:
        problem = "goes on with exchanges between steps"
    elif choosers := sorted(_CHOOSERS & {each.name for each in tree(hook)}):
        problem = f"chooses hooks itself, in {choosers[0]!r}"
    if problem:
        raise CommHookOptionError(
            f"{where}: expected hooks that average gradients in the same step, such as int8 or "
            f"powersgd; {hook!r} {problem}"
        )
