"""The choices of ``auto``: hooks for groups of parameters, and given plans."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from commhooks.algorithms.wrappers.route import Rule, predicate_of
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, Role
from commhooks.hook.registry import declared_candidates
from commhooks.hook.spec import hook_spec
from commhooks.planning import Group, Plan
from reducer import GradBucket

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
_AFTER_WARM_UPS = 1 << 30
"""A step in which hooks send what they send for most of the training."""

Buckets: TypeAlias = list[tuple[list[str], int]]
"""The names of the parameters and the bytes of each bucket of a step."""


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


def parse_plan(value: Any) -> Any:
    """Return the plan in a file or in JSON's types. Raises ValueError if there is none."""
    try:
        if isinstance(value, str):
            return Plan.load(value)
        return Plan.from_json(value) if isinstance(value, Mapping) else value
    except CommHookError as error:
        raise ValueError(str(error)) from error


def check_plan(plan: Plan, parameters: Collection[str], owner: str) -> None:
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


def exact_names(
    rules: Sequence[Rule], parameters: Mapping[str, Tensor], roles: Mapping[str, Role] | None
) -> set[str]:
    """Return the names of the parameters that match one of the rules.

    Raises CommHookOptionError if a rule is invalid.
    """
    known = roles or {}
    predicates = [predicate_of(str(r), f"exact.{i}", known, "auto") for i, r in enumerate(rules)]
    return {name for name, p in parameters.items() if any(m(name, p) for m in predicates)}


def group_parameters(
    buckets: Sequence[Sequence[str]],
    parameters: Mapping[str, Tensor],
    exact: Collection[str],
    roles: Mapping[str, Role],
) -> tuple[Group, ...]:
    """Return the groups of buckets, which are given as the names of their parameters."""
    members: dict[tuple[int, bool, object], list[str]] = {}
    for index, names in enumerate(buckets):
        for name in names:
            parameter = parameters[name]
            # Powers of 4: parameters of a group differ by less than a factor of 4.
            size = int(math.log2(max(parameter.numel(), 1)) / 2)
            kind = (roles.get(name), parameter.dim() > 1, size)
            members.setdefault((index, name in exact, kind), []).append(name)
    return tuple(
        Group(tuple(names), bucket, sum(parameters[name].numel() for name in names), is_exact)
        for (bucket, is_exact, _), names in members.items()
    )


def wire_bytes_of(
    hook: CommHook, names: Sequence[str], parameters: Mapping[str, Tensor], size: int
) -> int | None:
    """Return what a prepared hook sends for some parameters among ``size`` ranks, by its formula.

    None if it has none, or one that reads numbers, against the rules.
    """
    like = [torch.empty_like(parameters[name], device="meta") for name in names]
    flat = torch.empty(sum(p.numel() for p in like), dtype=like[0].dtype, device="meta")
    try:
        return hook.wire_bytes(GradBucket(flat, like, list(names), step=_AFTER_WARM_UPS), size)
    except RuntimeError:  # what operations on the meta device raise
        return None
