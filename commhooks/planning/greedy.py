"""Spends the limit of error where it saves most: the greedy rule that proposes plans.

::

    while there is a move: make the one that saves most seconds per squared error

A move gives one group of a bucket, or all groups of one hook there, another hook. Only buckets
count that delay the end of the step: those since the link was last idle. Seconds are sums here:

    overhead + latency of the collectives        once, if any group of the bucket has the hook
    local seconds + bytes / rate                 for each group

The timeline, which knows what overlaps, decides among the assignments on the way (solver.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from commhooks.planning.problem import (
    Assignment,
    Problem,
    exact,
    latency_seconds,
    loss,
    sending_seconds,
)

__all__ = ["proposals"]

_LOCAL_WEIGHTS = (1.0, 0.0)
"""Local work delays the collectives of its bucket, but overlaps with those of other buckets."""
_KEPT = 16
"""Assignments of each way that the timeline compares."""


def proposals(problem: Problem) -> list[Assignment]:
    """Return assignments within the limit, from exact averages to the soonest end."""
    found: list[Assignment] = []
    for weight in _LOCAL_WEIGHTS:
        for by in (_per_error, _seconds_alone):
            way = list(_way(problem, weight, by))
            found += [*way[:: max(1, len(way) // _KEPT)], way[-1]]
    return list(dict.fromkeys(found))


class _Option(NamedTuple):
    """A choice of a group, whose position in ``Group.choices`` is ``position``."""

    position: int
    hook: int
    seconds: float
    loss: float


class _Move(NamedTuple):
    """Other options for some groups of a bucket."""

    saved: float
    loss: float
    options: Mapping[int, _Option]


_Value = Callable[[_Move], tuple[float, float]]


def _per_error(move: _Move) -> tuple[float, float]:
    return (move.saved / move.loss if move.loss > 0 else math.inf), move.saved


def _seconds_alone(move: _Move) -> tuple[float, float]:
    """Prefer large groups: if small ones come first, the limit may not suffice for them."""
    return move.saved, -move.loss


class _Bucket:
    """The options of a bucket's groups, by their positions in the problem, and those picked."""

    def __init__(self, problem: Problem, index: int, local_weight: float, by: _Value) -> None:
        self._by = by
        self._fixed: dict[int, float] = {}
        self._options: dict[int, list[_Option]] = {}
        self.picked: dict[int, _Option] = {}
        for i, group in enumerate(problem.groups):
            if group.bucket != index:
                continue
            self._options[i] = []
            for position, choice in enumerate(group.choices):
                fixed = latency_seconds(problem, choice)
                fixed += local_weight * problem.overheads[choice.hook]
                self._fixed[choice.hook] = max(fixed, self._fixed.get(choice.hook, 0.0))
                seconds = sending_seconds(problem, choice)
                seconds += local_weight * math.fsum(choice.local_seconds)
                option = _Option(position, choice.hook, seconds, loss(group, choice))
                if choice.error < 1:
                    self._options[i].append(option)
                if choice is group.exact:
                    self.picked[i] = option
        self.pick({})

    def pick(self, options: Mapping[int, _Option]) -> None:
        """Make a move, and sort those that are then possible, the best first."""
        self.picked.update(options)
        self.seconds = self._seconds(self.picked)
        moves = [move for move in map(self._move, self._changes()) if move.saved > 0]
        self.moves = sorted(moves, key=self._by, reverse=True)

    def _changes(self) -> Iterator[dict[int, _Option]]:
        """Yield other options for each group alone, and one hook for all or those of one hook."""
        for i, options in self._options.items():
            yield from ({i: option} for option in options if option is not self.picked[i])
        former = {option.hook for option in self.picked.values()}
        for hook in self._fixed:
            of_hook = {
                i: option
                for i, options in self._options.items()
                for option in options
                if option.hook == hook and option is not self.picked[i]
            }
            for only in (former, *({each} for each in former if len(former) > 1)):
                some = {i: o for i, o in of_hook.items() if self.picked[i].hook in only}
                if len(some) > 1:
                    yield some

    def _move(self, options: dict[int, _Option]) -> _Move:
        given = math.fsum(new.loss - self.picked[i].loss for i, new in options.items())
        return _Move(self.seconds - self._seconds(self.picked | options), given, options)

    def _seconds(self, picked: Mapping[int, _Option]) -> float:
        growing = math.fsum(option.seconds for option in picked.values())
        return growing + math.fsum(self._fixed[h] for h in {o.hook for o in picked.values()})


def _way(problem: Problem, local_weight: float, by: _Value) -> Iterator[Assignment]:
    """Yield exact averages, and the assignment after each move."""
    left = problem.error**2 * math.fsum(group.norm**2 for group in problem.groups)
    buckets = [_Bucket(problem, i, local_weight, by) for i in range(len(problem.buckets))]
    assignment = list(exact(problem))
    yield tuple(assignment)
    for _ in range(4 * len(problem.groups)):  # each is moved a few times at most
        late = buckets[_first_late(problem, buckets) :]
        best = [(next((m for m in b.moves if m.loss <= left), None), b) for b in late]
        moves = [(move, bucket) for move, bucket in best if move is not None]
        if not moves:
            return
        move, bucket = max(moves, key=lambda pair: by(pair[0]))
        bucket.pick(move.options)
        left -= move.loss
        for i, option in move.options.items():
            assignment[i] = option.position
        yield tuple(assignment)


def _first_late(problem: Problem, buckets: list[_Bucket]) -> int:
    """Return the last bucket that begins as soon as backward has completed it."""
    finish = ready = 0.0
    first = 0
    for i, (bucket, times) in enumerate(zip(buckets, problem.buckets, strict=True)):
        ready += times.backward_seconds
        if finish <= ready:
            first = i
        finish = max(finish, ready) + bucket.seconds
    return first
