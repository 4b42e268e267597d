"""What there is to choose from, in numbers: the input of the solver."""

import math
from dataclasses import dataclass

from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import Collective
from commhooks.errors import CommHookOptionError

__all__ = ["BucketTimes", "Choice", "Group", "Problem"]

_MOST_HOOKS = 62
"""The solver has sets of hooks in the bits of an int64."""


@dataclass(frozen=True)
class Choice:
    """What one hook does with one group of parameters.

    ``local_seconds`` and ``collectives`` are as in :class:`BucketTrace`, but only the part of the
    hook's own work that grows with the group; the rest is in ``Problem.overheads``.
    """

    hook: int
    """The position of the hook in ``Problem.hooks``."""
    local_seconds: tuple[float, ...]
    collectives: tuple[Collective, ...]
    error: float
    """|average - exact| / |exact|, where ``exact`` averages gradient plus residual.

    0 for an exact hook, and infinity for a hook that cannot average this group.
    """


@dataclass(frozen=True)
class Group:
    """Parameters of one bucket that get the same hook."""

    names: tuple[str, ...]
    bucket: int
    label: str
    """What to call the group in a table, such as ``attention.weight x12``."""
    elements: int
    norm: float
    """Of the average gradient."""
    choices: tuple[Choice, ...]
    """At most one per hook; at least one has an error of 0."""

    @property
    def exact(self) -> Choice:
        """The first exact choice: plain averaging."""
        return next(choice for choice in self.choices if choice.error == 0)


@dataclass(frozen=True)
class BucketTimes:
    """What the engine does with one bucket, as in :class:`BucketTrace`."""

    backward_seconds: float
    unpack_seconds: float
    gradient_bytes: int


@dataclass(frozen=True)
class Problem:
    """Choose a hook for each group so that a step is short and its average is close enough.

    The limit on errors is ``sum(loss(group, choice)) <= limit**2 * sum(norm**2)`` over all groups,
    where ``limit`` is the ``error`` of the problem; see assignment.py for ``loss``.

    Raises CommHookOptionError for numbers that do not belong together.
    """

    hooks: tuple[str, ...]
    """Specs as on the command line, such as ``powersgd:rank=4``."""
    overheads: tuple[float, ...]
    """For each hook, the seconds that one run costs, whatever the size of its bucket."""
    groups: tuple[Group, ...]
    buckets: tuple[BucketTimes, ...]
    """In the order in which backward completes them."""
    forward_seconds: float
    network: Network
    backend: Backend
    cores: float
    """The cores that the threads of one rank share."""
    error: float

    def __post_init__(self) -> None:
        if not self.error >= 0:
            raise CommHookOptionError(f"error: expected a limit of at least 0, found {self.error}")
        if len(self.hooks) > _MOST_HOOKS:
            raise CommHookOptionError(
                f"expected at most {_MOST_HOOKS} candidates, found {len(self.hooks)}"
            )
        if len(self.overheads) != len(self.hooks):
            raise CommHookOptionError(
                f"expected one overhead per hook, found {len(self.overheads)} for "
                f"{len(self.hooks)} hooks"
            )
        names = [name for group in self.groups for name in group.names]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CommHookOptionError(f"parameter {twice!r} is in two groups")
        for group in self.groups:
            self._check(group)

    def _check(self, group: Group) -> None:
        hooks = [choice.hook for choice in group.choices]
        wrong = ""
        if not 0 <= group.bucket < len(self.buckets):
            wrong = f"expected a bucket below {len(self.buckets)}, found {group.bucket}"
        elif not 0 <= group.norm < math.inf:
            wrong = f"expected a finite norm, found {group.norm}"
        elif not set(hooks) <= set(range(len(self.hooks))) or len(set(hooks)) < len(hooks):
            wrong = f"expected choices of different hooks of {len(self.hooks)}, found {hooks}"
        elif not all(choice.error >= 0 for choice in group.choices):
            wrong = "expected errors of at least 0"
        elif all(choice.error > 0 for choice in group.choices):
            wrong = "expected an exact choice, found none"
        elif any(len(c.local_seconds) != len(c.collectives) + 1 for c in group.choices):
            wrong = "expected local seconds before, between and after the collectives"
        if wrong:
            raise CommHookOptionError(f"group {group.label!r}: {wrong}")
