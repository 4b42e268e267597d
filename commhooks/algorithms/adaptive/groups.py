"""Groups of parameters that get the same hook: those of a bucket with a role and a similar size."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from commhooks.algorithms.wrappers.route_rules import Matcher, Rule
from commhooks.hook.base import Role
from commhooks.planning.row import label_of

__all__ = ["Layout", "ParameterGroup", "exact_names", "group_parameters"]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one bucket."""

    names: tuple[str, ...]
    bucket: int
    """The index of the bucket."""
    elements: int
    is_exact: bool
    """Whether the user wants plain averages of them."""

    @property
    def label(self) -> str:
        """A name for tables: what the parameters' names have in common."""
        return label_of(self.names)


@dataclass(frozen=True)
class Layout:
    """The buckets of a step, in order, and their groups."""

    buckets: tuple[tuple[str, ...], ...]
    """The names of the parameters of each."""
    bucket_bytes: tuple[int, ...]
    groups: tuple[ParameterGroup, ...]

    @property
    def elements(self) -> int:
        return sum(group.elements for group in self.groups)


def exact_names(
    rules: Sequence[Rule], parameters: Mapping[str, Tensor], roles: Mapping[str, Role] | None
) -> set[str]:
    """Return the names of the parameters that match one of the rules.

    Raises CommHookOptionError for a rule that is none.
    """
    matchers = [Matcher.of(str(rule), f"exact.{i}", roles or {}) for i, rule in enumerate(rules)]
    return {name for name, p in parameters.items() if any(m.matches(name, p) for m in matchers)}


def group_parameters(
    buckets: Sequence[tuple[Sequence[str], int]],
    parameters: Mapping[str, Tensor],
    exact: Collection[str],
    roles: Mapping[str, Role],
) -> Layout:
    """Return the layout of buckets, given as the names of their parameters and their bytes."""
    members: dict[tuple[object, ...], list[str]] = {}
    for index, (names, _) in enumerate(buckets):
        for name in names:
            parameter = parameters[name]
            # Powers of 4: parameters of a group differ by less than a factor of 4.
            size = int(math.log2(max(parameter.numel(), 1)) / 2)
            key = (index, name in exact, roles.get(name), parameter.dim() > 1, size)
            members.setdefault(key, []).append(name)
    groups = tuple(
        ParameterGroup(
            tuple(names),
            names_bucket,
            sum(parameters[name].numel() for name in names),
            bool(is_exact),
        )
        for (names_bucket, is_exact, *_), names in members.items()
        if isinstance(names_bucket, int)
    )
    return Layout(
        tuple(tuple(names) for names, _ in buckets), tuple(size for _, size in buckets), groups
    )
