"""Groups of parameters that get the same hook: those of a bucket with a role and a similar size."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from commhooks.hook.base import Role
from commhooks.hook.derived_bucket import BucketPart
from reducer import GradBucket

__all__ = ["BucketGroup", "groups_of"]


@dataclass(frozen=True)
class BucketGroup:
    """Some parameters of a bucket."""

    bucket: int
    names: tuple[str, ...]
    is_exact: bool
    """Whether the user wants plain averages of them."""
    part: BucketPart

    @cached_property
    def gradients(self) -> GradBucket:
        """These parameters as a bucket of their own."""
        return self.part.bucket(0, is_last=True)

    @property
    def signature(self) -> tuple[tuple[int, ...], ...]:
        """What groups with the same costs have in common."""
        return tuple(tuple(gradient.shape) for gradient in self.gradients.gradients())

    @property
    def label(self) -> str:
        """The name of the first parameter, and how many follow."""
        more = len(self.names) - 1
        return f"{self.names[0]} + {more}" if more else self.names[0]


def groups_of(
    bucket: GradBucket,
    index: int,
    exact: Collection[str],
    roles: Mapping[str, Role],
) -> list[BucketGroup]:
    """Return the groups of a bucket. Sizes in a group differ by less than a factor of 4."""
    members: dict[tuple[object, ...], list[int]] = {}
    for position, (name, gradient) in enumerate(zip(bucket.names, bucket.gradients(), strict=True)):
        size = int(math.log2(max(gradient.numel(), 1)) / 2)
        key = (name in exact, roles.get(name), gradient.dim() > 1, size)
        members.setdefault(key, []).append(position)
    return [
        BucketGroup(index, tuple(part.names), bool(key[0]), part)
        for key, positions in members.items()
        for part in [BucketPart(bucket, positions)]
    ]
