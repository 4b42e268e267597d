"""The hooks that plans choose from, and those that a given plan names."""

from collections.abc import Collection, Mapping
from typing import Any

from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.base import CommHook
from commhooks.hook.registry import declared_candidates
from commhooks.hook.spec import hook_spec
from commhooks.planning import Plan

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


def plan_of(value: Any) -> Any:
    """Return the plan in a file or in JSON's types. Raises ValueError if there is none."""
    try:
        if isinstance(value, str):
            return Plan.load(value)
        return Plan.from_json(value) if isinstance(value, Mapping) else value
    except CommHookError as error:
        raise ValueError(str(error)) from error


def hooks_of_plan(plan: Plan, owner: str) -> dict[str, CommHook]:
    """Return the hooks of a plan by their specs. Raises CommHookOptionError."""
    try:
        return {spec: hook_spec(spec).create() for spec in {row.hook: None for row in plan.rows}}
    except CommHookError as error:
        raise CommHookOptionError(f"option 'plan' of hook {owner!r}: {error}") from error


def check_names(plan: Plan, parameters: Collection[str], owner: str) -> None:
    """Raise CommHookError if a plan with groups is for other parameters."""
    planned = set(plan.hook_of())
    for what, names in (
        ("the model has no parameter", planned - {*parameters}),
        ("the plan has no parameter", {*parameters} - planned),
    ):
        if names and planned:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CommHookError(
                f"hook {owner!r}: expected a plan for the parameters of this model, but {what} "
                f"{min(names)!r}{more}; make the plan again with this model"
            )
