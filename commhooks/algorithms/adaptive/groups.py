"""Groups of parameters that get the same hook: those of a bucket with a role and a similar size."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from commhooks.algorithms.wrappers.route import Matcher, Rule
from commhooks.hook.base import CommHook
from commhooks.hook.capabilities import Role
from commhooks.planning.plan import label_of
from reducer import GradBucket

__all__ = [
    "Buckets",
    "Layout",
    "ParameterGroup",
    "exact_names",
    "group_parameters",
    "with_wire_bytes",
]

_AFTER_WARM_UPS = 1 << 30
"""A step in which hooks send what they send for most of the training."""


Buckets = tuple[tuple[tuple[str, ...], int], ...]
"""The names of the parameters and the bytes of each bucket of a step."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one bucket."""

    names: tuple[str, ...]
    bucket: int
    """The index of the bucket."""
    elements: int
    is_exact: bool
    """Whether the user wants plain averages of them."""
    wire_bytes: Mapping[int, int] = field(default_factory=dict, hash=False)
    """What a rank sends of them by the formula of a hook, by the position of the hook."""

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

    def itemsize(self, bucket: int) -> float:
        """Return the bytes of an element of a bucket."""
        elements = sum(group.elements for group in self.groups if group.bucket == bucket)
        return self.bucket_bytes[bucket] / max(elements, 1)


def exact_names(
    rules: Sequence[Rule], parameters: Mapping[str, Tensor], roles: Mapping[str, Role] | None
) -> set[str]:
    """Return the names of the parameters that match one of the rules.

    Raises CommHookOptionError if a rule is invalid.
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


def with_wire_bytes(
    layout: Layout, parameters: Mapping[str, Tensor], hooks: Mapping[int, CommHook], size: int
) -> Layout:
    """Return the layout with what each of the prepared ``hooks`` sends among ``size`` ranks."""

    def known(group: ParameterGroup) -> dict[int, int]:
        bucket = _bucket_of([parameters[name] for name in group.names], group.names)
        found = {i: _wire_bytes(hook, bucket, size) for i, hook in hooks.items()}
        return {i: nbytes for i, nbytes in found.items() if nbytes is not None}

    groups = tuple(replace(group, wire_bytes=known(group)) for group in layout.groups)
    return replace(layout, groups=groups)


def _wire_bytes(hook: CommHook, bucket: GradBucket, size: int) -> int | None:
    """Return what the hook says, or None if it reads numbers, against the rules of the formula."""
    try:
        return hook.wire_bytes(bucket, size)
    except RuntimeError:  # what operations on the meta device raise
        return None


def _bucket_of(parameters: Sequence[Tensor], names: Sequence[str]) -> GradBucket:
    """Return a bucket that has shapes, but no numbers."""
    like = [torch.empty_like(parameter, device="meta") for parameter in parameters]
    flat = torch.empty(sum(p.numel() for p in like), dtype=like[0].dtype, device="meta")
    return GradBucket(flat, like, list(names), step=_AFTER_WARM_UPS)
