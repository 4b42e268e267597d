"""What there is to choose from, in numbers, and what a choice for each group costs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace, Collective, StepTrace
from commhooks.errors import CommHookOptionError

__all__ = [
    "Assignment",
    "Choice",
    "Group",
    "Problem",
    "chosen",
    "exact",
    "latency_seconds",
    "loss",
    "relative_error",
    "sending_seconds",
    "squared_error",
    "step_trace",
    "uniform",
]


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
class Problem:
    """Choose a hook for each group so that a step is short and its average is close enough.

    The limit on errors is ``sum(loss(group, choice)) <= limit**2 * sum(norm**2)`` over all groups,
    where ``limit`` is the ``error`` of the problem; see :func:`loss`.

    Raises CommHookOptionError for numbers that do not belong together.
    """

    hooks: tuple[str, ...]
    """Specs as on the command line, such as ``powersgd:rank=4``."""
    overheads: tuple[float, ...]
    """For each hook, the seconds that one run costs, whatever the size of its bucket."""
    groups: tuple[Group, ...]
    buckets: tuple[BucketTrace, ...]
    """Without a hook, in the order in which backward completes them."""
    forward_seconds: float
    network: Network
    backend: Backend
    cores: float
    """The cores that the threads of one rank share."""
    error: float

    def __post_init__(self) -> None:
        if not self.error >= 0:
            raise CommHookOptionError(f"error: expected a limit of at least 0, found {self.error}")
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


Assignment: TypeAlias = tuple[int, ...]
"""For each group, the position of its choice in ``Group.choices``."""


def chosen(problem: Problem, assignment: Assignment) -> Iterator[tuple[Group, Choice]]:
    """Yield each group with its choice."""
    for group, position in zip(problem.groups, assignment, strict=True):
        yield group, group.choices[position]


def exact(problem: Problem) -> Assignment:
    """Return plain averaging."""
    return tuple(group.choices.index(group.exact) for group in problem.groups)


def uniform(problem: Problem, hook: int) -> Assignment:
    """Return one hook for all groups that it contracts; the others are averaged exactly."""
    return tuple(
        next(
            (i for i, choice in enumerate(g.choices) if choice.hook == hook and choice.error < 1),
            g.choices.index(g.exact),
        )
        for g in problem.groups
    )


def loss(group: Group, choice: Choice) -> float:
    """Return the group's part of the sum of squared errors."""
    return squared_error(choice.error, group.norm)


def squared_error(error: float, norm: float) -> float:
    """Return |average - exact|^2 of a hook with error feedback, after many steps.

    It averages p = g + r, where r is the error of the step before, so |r| = ``error`` |p|. If r
    does not depend on the gradient g, whose average has this ``norm``, |p|^2 = |g|^2 + |r|^2.
    """
    if norm == 0 or error == 0:
        return 0.0
    return (error * norm) ** 2 / (1 - error**2) if error < 1 else math.inf


def relative_error(problem: Problem, assignment: Assignment) -> float:
    """Return |average - exact| over all groups, relative to the norm of the average gradient."""
    total = math.fsum(group.norm**2 for group in problem.groups)
    lost = math.fsum(loss(*pair) for pair in chosen(problem, assignment))
    return math.sqrt(lost / total) if total else 0.0


def step_trace(problem: Problem, assignment: Assignment) -> StepTrace:
    """Return what a rank does in a step.

    The hooks of a bucket run one after the other, in the order of ``Problem.hooks``. A hook that
    several groups of a bucket chose runs once, with the sum of their bytes.
    """
    by_bucket: dict[int, list[Choice]] = {}
    for group, choice in chosen(problem, assignment):
        by_bucket.setdefault(group.bucket, []).append(choice)
    buckets = []
    for index, bucket in enumerate(problem.buckets):
        local, collectives = _bucket(problem, by_bucket.get(index, []))
        buckets.append(replace(bucket, local_seconds=local, collectives=collectives))
    return StepTrace(tuple(buckets), problem.forward_seconds, is_native=False)


@dataclass
class _Run:
    """One run of a hook."""

    local: list[float]
    collectives: list[Collective]

    def add(self, choice: Choice) -> bool:
        """Add a group to this run, if its collectives are alike."""
        alike = [(c.operation, c.members) for c in choice.collectives]
        if alike != [(c.operation, c.members) for c in self.collectives]:
            return False
        self.local = [a + b for a, b in zip(self.local, choice.local_seconds, strict=True)]
        self.collectives = [
            replace(own, tensor_bytes=own.tensor_bytes + other.tensor_bytes)
            for own, other in zip(self.collectives, choice.collectives, strict=True)
        ]
        return True


def _bucket(
    problem: Problem, choices: Sequence[Choice]
) -> tuple[tuple[float, ...], tuple[Collective, ...]]:
    local, collectives = [0.0], list[Collective]()
    in_order = sorted(choices, key=lambda choice: choice.hook)
    for hook, of_hook in groupby(in_order, key=lambda choice: choice.hook):
        runs: list[_Run] = []
        for choice in of_hook:
            if not any(run.add(choice) for run in runs):
                runs.append(_Run(list(choice.local_seconds), list(choice.collectives)))
        local[-1] += problem.overheads[hook]
        for run in runs:
            local[-1] += run.local[0]
            local += run.local[1:]
            collectives += run.collectives
    return tuple(local), tuple(collectives)


def latency_seconds(problem: Problem, choice: Choice) -> float:
    """Return the seconds of the collectives of a choice if they sent nothing."""
    return math.fsum(_seconds(problem, _empty(c)) for c in choice.collectives)


def sending_seconds(problem: Problem, choice: Choice) -> float:
    """Return the time that the bytes of a group add to its collectives."""
    return math.fsum(
        _seconds(problem, collective) - _seconds(problem, _empty(collective))
        for collective in choice.collectives
    )


def _empty(collective: Collective) -> Collective:
    return Collective(collective.operation, 0.0, collective.members)


def _seconds(problem: Problem, collective: Collective) -> float:
    """Return the time of a collective that shares nothing with others."""
    network = problem.network
    cost = problem.backend.cost(collective, network)
    return cost.latency_seconds + max(
        cost.link_bytes / network.link.bytes_per_second,
        cost.node_bytes / network.node_link.bytes_per_second,
        cost.cpu_seconds,
    )
