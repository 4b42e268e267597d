"""The planning problem in numbers: candidate hooks for each group, and their costs."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace, Collective, StepTrace, merged_work
from commhooks.costs.timeline import Interval, Timing, replay
from commhooks.errors import CommHookOptionError
from commhooks.planning.plan import label_of

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Choice:
    """The effect of a hook on one group of parameters, or on a sample of it.

    ``local_seconds`` and ``collectives`` are as in :class:`BucketTrace`: of a sample, all of the
    hook's own work; in ``Group.choices``, the part that grows with the group.
    """

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


def overhead_of(tried: Iterable[Choice]) -> float:
    """Return the seconds of a run of a hook on nothing, by what it has done with samples.

    On a line through the fewest and the most elements. If there are not twice as many, which does
    not tell the costs apart, half of the time counts.
    """
    points = [(choice.elements, choice.seconds) for choice in tried] or [(0, 0.0)]
    (least, shortest), (most, longest) = min(points), max(points)
    at_zero = shortest / 2
    if most > 0 and most >= 2 * least:
        at_zero = shortest - (longest - shortest) * least / (most - least)
    return min(shortest, max(0.0, at_zero))


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
    choices: Mapping[str, Choice] = field(default_factory=dict)
    """The candidate hooks of the group, plain averaging among them."""

    def loss(self, hook: str) -> float:
        """Return |average - exact|^2 of a hook with error feedback, after many steps.

        It averages p = g + r, where r is the error of the step before, so |r| = ``error`` |p|. If r
        does not depend on the gradient g, whose average has this ``norm``, |p|^2 = |g|^2 + |r|^2.
        """
        error = self.choices[hook].error
        if self.norm == 0 or error == 0:
            return 0.0
        return (error * self.norm) ** 2 / (1 - error**2) if error < 1 else math.inf


def relative(squares: Iterable[float], norms: Iterable[float]) -> float:
    """Return the root of the sum of ``squares``, relative to the norm of all groups together."""
    total = math.fsum(norm**2 for norm in norms)
    return math.sqrt(math.fsum(squares) / total) if total else 0.0


Assignment: TypeAlias = tuple[str, ...]
"""The hook of each group."""


@dataclass(frozen=True)
class Problem:
    """Choose a hook for each group so that a step is short and its average is close enough.

    The limit on errors is ``sum(group.loss(hook)) <= error**2 * sum(group.norm**2)`` over all
    groups.

    Raises CommHookOptionError for numbers that do not belong together.
    """

    overheads: Mapping[str, float]
    """The hooks, as specs such as ``powersgd:rank=4``, plain averaging first, and the seconds that
    one run of each costs, whatever the size of its bucket."""
    groups: tuple[Group, ...]
    step: StepTrace
    """A step without hooks. Its buckets are in the order in which backward completes them."""
    network: Network
    backend: Backend
    cores: float
    """The cores that the threads of one rank share."""
    error: float

    def __post_init__(self) -> None:
        if (wrong := next(self._wrong(), None)) is not None:
            raise CommHookOptionError(wrong)

    def _wrong(self) -> Iterator[str]:
        """Yield what does not belong together. The first one counts: others may rely on it."""
        if not self.error >= 0:
            yield f"error: expected a limit of at least 0, found {self.error}"
        names = Counter(name for group in self.groups for name in group.names)
        yield from (f"parameter {name!r} is in two groups" for name in names if names[name] > 1)
        for group in self.groups:
            errors = {hook: choice.error for hook, choice in group.choices.items()}
            expected = f"group {label_of(group.names)!r}: expected"
            if not 0 <= group.norm < math.inf:
                yield f"{expected} a finite norm, found {group.norm}"
            if self.plain not in errors or not errors.keys() <= self.overheads.keys():
                yield f"{expected} choices of {', '.join(self.overheads)}, found {list(errors)}"
            if errors[self.plain] != 0 or not all(error >= 0 for error in errors.values()):
                yield f"{expected} errors of at least 0, that of {self.plain} 0, found {errors}"

    @property
    def plain(self) -> str:
        """Plain averaging."""
        return next(iter(self.overheads))

    @property
    def allowed_loss(self) -> float:
        """The largest sum of squared errors within the limit."""
        total = math.fsum(group.norm**2 for group in self.groups)
        return (self.error * (1 + _ROUNDING)) ** 2 * total

    def uniform(self, hook: str) -> Assignment:
        """Return one hook for all groups that it contracts; the others are averaged exactly."""
        contracts = (hook in g.choices and g.choices[hook].error < 1 for g in self.groups)
        return tuple(hook if each else self.plain for each in contracts)

    def assignment(self, hooks: Mapping[str, str]) -> Assignment | None:
        """Return the assignment in which parameters have these hooks; None if there is none.

        Parameters that are not in it are averaged exactly.
        """
        found = list[str]()
        for group in self.groups:
            specs = {hooks.get(name, self.plain) for name in group.names}
            found += specs & group.choices.keys() if len(specs) == 1 else ()
        return tuple(found) if len(found) == len(self.groups) else None

    def error_of(self, assignment: Assignment) -> float:
        """Return |average - exact| over all groups, relative to the norm of the average."""
        return relative(map(Group.loss, self.groups, assignment), (g.norm for g in self.groups))

    def allows(self, assignment: Assignment) -> bool:
        """Return whether the error is allowed, and that of each group is below 1."""
        choices = (g.choices[hook] for g, hook in zip(self.groups, assignment, strict=True))
        lost = math.fsum(map(Group.loss, self.groups, assignment))
        return lost <= self.allowed_loss and all(choice.error < 1 for choice in choices)

    def costs(self, group: Group, hook: str) -> tuple[float, float]:
        """Return the seconds of a run of the hook on nothing, and those that the group adds."""
        choice = group.choices[hook]
        empty = (replace(each, tensor_bytes=0.0) for each in choice.collectives)
        waiting = math.fsum(map(self._seconds, empty))
        sending = math.fsum(map(self._seconds, choice.collectives)) - waiting
        return self.overheads[hook] + waiting, sending + choice.seconds

    def _seconds(self, collective: Collective) -> float:
        return self.backend.cost(collective, self.network).seconds_alone(self.network)

    def replay(self, assignment: Assignment, intervals: list[Interval] | None = None) -> Timing:
        """Return the time of a step on the timeline; append what happens in it to ``intervals``."""
        trace = self.step_trace(assignment)
        return replay(trace, self.network, self.backend, self.cores, intervals)

    def intervals(self, hooks: Mapping[str, str]) -> list[Interval]:
        """Return what happens in a step in which parameters have these hooks."""
        assignment, intervals = self.assignment(hooks), list[Interval]()
        if assignment is None:
            raise ValueError("the hooks are those of a plan for another problem")
        self.replay(assignment, intervals)
        return intervals

    def step_trace(self, assignment: Assignment) -> StepTrace:
        """Return what a rank does in a step.

        The hooks of a bucket run one after the other, in the order of ``overheads``. A hook that
        several groups of a bucket chose runs once, with the sum of their bytes.
        """
        chosen: list[dict[str, list[Choice]]] = [{} for _ in self.step.buckets]
        for group, hook in zip(self.groups, assignment, strict=True):
            chosen[group.bucket].setdefault(hook, []).append(group.choices[hook])
        buckets = tuple(map(self._with_hooks, self.step.buckets, chosen))
        return replace(self.step, buckets=buckets, is_native=False)

    def _with_hooks(
        self, bucket: BucketTrace, chosen: Mapping[str, Sequence[Choice]]
    ) -> BucketTrace:
        local, collectives = [0.0], list[Collective]()
        for hook in filter(chosen.__contains__, self.overheads):
            runs: dict[object, list[Choice]] = {}
            for choice in chosen[hook]:
                alike = tuple((each.operation, each.members) for each in choice.collectives)
                runs.setdefault(alike, []).append(choice)
            local[-1] += self.overheads[hook]
            for choices in runs.values():
                together = merged_work(choices, math.fsum, math.fsum)
                local[-1] += together.local_seconds[0]
                local += together.local_seconds[1:]
                collectives += together.collectives
        return replace(bucket, local_seconds=tuple(local), collectives=tuple(collectives))
