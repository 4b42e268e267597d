"""What there is to choose from, in numbers, and what a choice for each group costs."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace, Collective, StepTrace, merged_work
from commhooks.costs.timeline import Span, Timing, replay
from commhooks.errors import CommHookOptionError
from commhooks.planning.plan import label_of

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Choice:
    """What one hook does with one group of parameters, or has done with a sample of it.

    ``local_seconds`` and ``collectives`` are as in :class:`BucketTrace`: of a sample, all of the
    hook's own work; in ``Group.choices``, the part that grows with the group.
    """

    hook: int
    """The position of the hook in ``Problem.hooks``."""
    local_seconds: tuple[float, ...]
    collectives: tuple[Collective, ...]
    error: float
    """|average - exact| / |exact|, where ``exact`` averages gradient plus residual.

    0 for an exact hook, and infinity for a hook that cannot average this group.
    """
    elements: int = 0
    """The number of elements that it was done with."""

    @property
    def seconds(self) -> float:
        """The hook's own work."""
        return math.fsum(self.local_seconds)

    def scaled(self, elements: int, overhead: float, sent: float | None = None) -> "Choice":
        """Return what grows with a group of ``elements``, given what was done with a sample.

        ``overhead``: seconds of a run of the hook on nothing. ``sent``: bytes sent for the group,
        relative to those of the sample; by default as for the elements.
        """
        more = elements / max(self.elements, 1)
        growing = max(0.0, self.seconds - overhead) / (self.seconds or 1.0) * more
        factor = more if sent is None else sent
        scaled = merged_work([self], lambda each: each[0] * growing, lambda each: each[0] * factor)
        return replace(scaled, elements=elements)


def overheads_of(outcomes: Mapping[tuple[int, int], Choice], hooks: int) -> tuple[float, ...]:
    """Return the seconds of a run of each hook on nothing, by what it has done with samples.

    On a line through the fewest and the most elements. If there are not twice as many, which does
    not tell the costs apart, half of the time counts.
    """
    found = []
    for hook in range(hooks):
        points = [(c.elements, c.seconds) for c in outcomes.values() if c.hook == hook]
        (least, shortest), (most, longest) = min(points or [(0, 0.0)]), max(points or [(0, 0.0)])
        at_zero = shortest / 2
        if most > 0 and most >= 2 * least:
            at_zero = shortest - (longest - shortest) * least / (most - least)
        found.append(min(shortest, max(0.0, at_zero)))
    return tuple(found)


@dataclass(frozen=True)
class Group:
    """Parameters of one bucket that get the same hook."""

    names: tuple[str, ...]
    bucket: int
    elements: int
    is_exact: bool = False
    """Whether only plain averaging is allowed."""
    norm: float = math.nan
    """The norm of the average gradient, if it is known."""
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

    def loss(self, choice: Choice) -> float:
        """Return the group's part of the sum of squared errors."""
        return squared_error(choice.error, self.norm)


def squared_error(error: float, norm: float) -> float:
    """Return |average - exact|^2 of a hook with error feedback, after many steps.

    It averages p = g + r, where r is the error of the step before, so |r| = ``error`` |p|. If r
    does not depend on the gradient g, whose average has this ``norm``, |p|^2 = |g|^2 + |r|^2.
    """
    if norm == 0 or error == 0:
        return 0.0
    return (error * norm) ** 2 / (1 - error**2) if error < 1 else math.inf


Assignment: TypeAlias = tuple[Choice, ...]
"""One of its choices for each group."""


@dataclass(frozen=True)
class Problem:
    """Choose a hook for each group so that a step is short and its average is close enough.

    The limit on errors is ``sum(group.loss(choice)) <= error**2 * sum(group.norm**2)`` over all
    groups.

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
        names = [name for group in self.groups for name in group.names]
        wrong = ""
        if not self.error >= 0:
            wrong = f"error: expected a limit of at least 0, found {self.error}"
        elif len(self.overheads) != len(self.hooks):
            wrong = f"expected one overhead for each of {self.hooks}, found {self.overheads}"
        elif len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            wrong = f"parameter {twice!r} is in two groups"
        if wrong := wrong or next(filter(None, map(self._wrong_in, self.groups)), ""):
            raise CommHookOptionError(wrong)

    def _wrong_in(self, group: Group) -> str:
        hooks, errors = [c.hook for c in group.choices], [c.error for c in group.choices]
        wrong = ""
        if not 0 <= group.bucket < len(self.buckets):
            wrong = f"expected a bucket below {len(self.buckets)}, found {group.bucket}"
        elif not 0 <= group.norm < math.inf:
            wrong = f"expected a finite norm, found {group.norm}"
        elif not set(hooks) <= set(range(len(self.hooks))) or len(set(hooks)) < len(hooks):
            wrong = f"expected choices of different hooks of {len(self.hooks)}, found {hooks}"
        elif 0 not in errors or not all(error >= 0 for error in errors):
            wrong = f"expected errors of at least 0, one of them 0, found {errors}"
        elif any(len(c.local_seconds) != len(c.collectives) + 1 for c in group.choices):
            wrong = "expected local seconds before, between and after the collectives"
        return wrong and f"group {group.label!r}: {wrong}"

    @property
    def exact(self) -> Assignment:
        """Plain averaging."""
        return tuple(group.exact for group in self.groups)

    @property
    def allowed_loss(self) -> float:
        """The largest sum of squared errors within the limit."""
        total = math.fsum(group.norm**2 for group in self.groups)
        return (self.error * (1 + _ROUNDING)) ** 2 * total

    def uniform(self, hook: int) -> Assignment:
        """Return one hook for all groups that it contracts; the others are averaged exactly."""
        return tuple(
            next((c for c in g.choices if c.hook == hook and c.error < 1), g.exact)
            for g in self.groups
        )

    def assignment(self, hooks: Mapping[str, str]) -> Assignment | None:
        """Return the assignment in which parameters have these hooks; None if there is none.

        Parameters that are not in it are averaged exactly.
        """
        found = []
        for group in self.groups:
            specs = {hooks.get(name, self.hooks[group.exact.hook]) for name in group.names}
            found += [c for c in group.choices if {self.hooks[c.hook]} == specs]
        return tuple(found) if len(found) == len(self.groups) else None

    def error_of(self, assignment: Assignment) -> float:
        """Return |average - exact| over all groups, relative to the norm of the average."""
        total = math.fsum(group.norm**2 for group in self.groups)
        lost = math.fsum(map(Group.loss, self.groups, assignment))
        return math.sqrt(lost / total) if total else 0.0

    def allows(self, assignment: Assignment) -> bool:
        """Return whether the error is allowed, and that of each group is below 1."""
        lost = math.fsum(map(Group.loss, self.groups, assignment))
        return lost <= self.allowed_loss and all(choice.error < 1 for choice in assignment)

    def fixed_seconds(self, choice: Choice) -> float:
        """Return the seconds of a run that do not depend on its groups."""
        return self.overheads[choice.hook] + math.fsum(
            self._seconds(replace(each, tensor_bytes=0.0)) for each in choice.collectives
        )

    def sending_seconds(self, choice: Choice) -> float:
        """Return the time that the bytes of a group add to its collectives."""
        return math.fsum(
            self._seconds(each) - self._seconds(replace(each, tensor_bytes=0.0))
            for each in choice.collectives
        )

    def _seconds(self, collective: Collective) -> float:
        """Return the time of a collective that shares nothing with others."""
        network, cost = self.network, self.backend.cost(collective, self.network)
        return cost.latency_seconds + max(
            cost.link_bytes / network.link.bytes_per_second,
            cost.node_bytes / network.node_link.bytes_per_second,
            cost.cpu_seconds,
        )

    def replay(self, assignment: Assignment, spans: list[Span] | None = None) -> Timing:
        """Return the time of a step on the timeline; append what happens in it to ``spans``."""
        trace = self.step_trace(assignment)
        return replay(trace, self.network, self.backend, self.cores, spans)

    def step_trace(self, assignment: Assignment) -> StepTrace:
        """Return what a rank does in a step.

        The hooks of a bucket run one after the other, in the order of ``hooks``. A hook that
        several groups of a bucket chose runs once, with the sum of their bytes.
        """
        runs: dict[tuple[int, int, Hashable], list[Choice]] = {}
        for group, choice in zip(self.groups, assignment, strict=True):
            alike = tuple((each.operation, each.members) for each in choice.collectives)
            runs.setdefault((group.bucket, choice.hook, alike), []).append(choice)
        in_order = sorted(runs.items(), key=lambda run: run[0][:2])
        buckets = []
        for index, bucket in enumerate(self.buckets):
            local, collectives, hooks = [0.0], list[Collective](), set[int]()
            for (_, hook, _), choices in (run for run in in_order if run[0][0] == index):
                together = merged_work(choices, math.fsum, math.fsum)
                local[-1] += together.local_seconds[0]
                local[-1] += 0.0 if hook in hooks else self.overheads[hook]
                local += together.local_seconds[1:]
                collectives += together.collectives
                hooks.add(hook)
            done = tuple(local), tuple(collectives)
            buckets.append(replace(bucket, local_seconds=done[0], collectives=done[1]))
        return StepTrace(tuple(buckets), self.forward_seconds, is_native=False)
