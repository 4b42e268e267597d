"""Groups of parameters that get the same hook: those of a bucket with a role and a similar size."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from commhooks.algorithms.wrappers.route import Matcher, Rule
from commhooks.hook.base import CommHook
from commhooks.hook.capabilities import Role
from commhooks.planning import Group
from reducer import GradBucket

_AFTER_WARM_UPS = 1 << 30
"""A step in which hooks send what they send for most of the training."""

Buckets: TypeAlias = list[tuple[list[str], int]]
"""The names of the parameters and the bytes of each bucket of a step."""


def exact_names(
    rules: Sequence[Rule], parameters: Mapping[str, Tensor], roles: Mapping[str, Role] | None
) -> set[str]:
    """Return the names of the parameters that match one of the rules.

    Raises CommHookOptionError if a rule is invalid.
    """
    matchers = [Matcher.of(str(rule), f"exact.{i}", roles or {}) for i, rule in enumerate(rules)]
    return {name for name, p in parameters.items() if any(m.matches(name, p) for m in matchers)}


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
