"""What there is to choose from, in numbers, and what a choice for each group costs."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace
from commhooks.errors import CommHookOptionError
from commhooks.planning.plan import label_of

__all__ = [
    "Assignment",
    "Choice",
    "Group",
    "Outcome",
    "Problem",
    "chosen",
    "exact",
    "latency_seconds",
    "loss",
    "overheads_of",
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
class Outcome:
    """What a hook has done with a group, or with a sample of it: all of its own work."""

    group: int
    """The position of the group."""
    hook: int
    elements: int
    local_seconds: tuple[float, ...]
    collectives: tuple[Collective, ...]
    error: float

    @property
    def seconds(self) -> float:
        """The hook's own work."""
        return math.fsum(self.local_seconds)

    def choice(
        self, elements: int, overhead: float, error: float, sent: float | None = None
    ) -> Choice:
        """Return the choice of a group of ``elements``.

        Args:
            elements: Number of elements of the group.
            overhead: Seconds of a run of the hook on nothing.
            error: Of the choice.
            sent: Bytes sent for the group, relative to those of this outcome; by default as for the
                elements.
        """
        more = elements / max(self.elements, 1)
        growing = max(0.0, self.seconds - overhead) / (self.seconds or 1.0) * more
        return Choice(
            self.hook,
            tuple(seconds * growing for seconds in self.local_seconds),
            tuple(
                replace(each, tensor_bytes=each.tensor_bytes * (more if sent is None else sent))
                for each in self.collectives
            ),
            error,
        )


@dataclass(frozen=True)
class Group:
    """Parameters of one bucket that get the same hook."""

    names: tuple[str, ...]
    bucket: int
    elements: int
    is_exact: bool = False
    """Whether only plain averaging is allowed."""
    norm: float = math.nan
    """Of the average gradient, if it is known."""
    choices: tuple[Choice, ...] = ()
    """At most one per hook; at least one has an error of 0."""

    @property
    def label(self) -> str:
        """A name for tables, such as ``attention.*.weight x12``."""
        return label_of(self.names)

    @property
    def exact(self) -> Choice:
        """The first exact choice: plain averaging."""
        return next(choice for choice in self.choices if choice.error == 0)


def overheads_of(outcomes: Sequence[Outcome], hooks: int) -> tuple[float, ...]:
    """Return the seconds of a run of each hook on nothing.

    On a line through the fewest and the most elements. If there are not twice as many, which does
    not tell the costs apart, half of the time counts.
    """
    found = []
    for hook in range(hooks):
        points = sorted((each.elements, each.seconds) for each in outcomes if each.hook == hook)
        (least, shortest), (most, longest) = (points or [(0, 0.0)])[0], (points or [(0, 0.0)])[-1]
        at_zero = shortest / 2
        if most > 0 and most >= 2 * least:
            at_zero = shortest - (longest - shortest) * least / (most - least)
        found.append(min(shortest, max(0.0, at_zero)))
    return tuple(found)


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
    runs: dict[tuple[int, int, Hashable], list[Choice]] = {}
    for group, choice in chosen(problem, assignment):
        alike = tuple((each.operation, each.members) for each in choice.collectives)
        runs.setdefault((group.bucket, choice.hook, alike), []).append(choice)
    in_order = sorted(runs.items(), key=lambda run: run[0][:2])
    buckets = []
    for index, bucket in enumerate(problem.buckets):
        local, collectives, hooks = [0.0], list[Collective](), set[int]()
        for (_, hook, _), choices in (run for run in in_order if run[0][0] == index):
            local[-1] += 0.0 if hook in hooks else problem.overheads[hook]
            hooks.add(hook)
            first, *others = map(sum, zip(*(c.local_seconds for c in choices), strict=True))
            local[-1] += first
            local += others
            collectives += [
                replace(each[0], tensor_bytes=math.fsum(c.tensor_bytes for c in each))
                for each in zip(*(c.collectives for c in choices), strict=True)
            ]
        buckets.append(replace(bucket, local_seconds=tuple(local), collectives=tuple(collectives)))
    return StepTrace(tuple(buckets), problem.forward_seconds, is_native=False)


def latency_seconds(problem: Problem, choice: Choice) -> float:
    """Return the seconds of the collectives of a choice if they sent nothing."""
    return math.fsum(_seconds(problem, c.operation, 0.0, c.members) for c in choice.collectives)


def sending_seconds(problem: Problem, choice: Choice) -> float:
    """Return the time that the bytes of a group add to its collectives."""
    return math.fsum(
        _seconds(problem, c.operation, c.tensor_bytes, c.members) for c in choice.collectives
    ) - latency_seconds(problem, choice)


def _seconds(problem: Problem, operation: str, tensor_bytes: float, members: Members) -> float:
    """Return the time of a collective that shares nothing with others."""
    network = problem.network
    cost = problem.backend.cost(Collective(operation, tensor_bytes, members), network)
    return cost.latency_seconds + max(
        cost.link_bytes / network.link.bytes_per_second,
        cost.node_bytes / network.node_link.bytes_per_second,
        cost.cpu_seconds,
    )
