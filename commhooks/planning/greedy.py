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

_KEPT = 16
"""Assignments of each way that the timeline compares."""


def proposals(problem: Problem) -> list[Assignment]:
    """Return assignments within the limit, from exact averages to the soonest end."""
    found: list[Assignment] = []
    for by in (_per_error, _seconds_alone):
        way = list(_way(problem, by))
        found += [*way[:: max(1, len(way) // _KEPT)], way[-1]]
    return list(dict.fromkeys(found))


class _Move(NamedTuple):
    """Other choices for some groups of a bucket, by the positions of both."""

    saved: float
    loss: float
    picks: Mapping[int, int]


_Value = Callable[[_Move], tuple[float, float]]


def _per_error(move: _Move) -> tuple[float, float]:
    return (move.saved / move.loss if move.loss > 0 else math.inf), move.saved


def _seconds_alone(move: _Move) -> tuple[float, float]:
    """Prefer large groups: if small ones come first, the limit may not suffice for them."""
    return move.saved, -move.loss


class _Bucket:
    """The groups of a bucket by their positions, and the choices picked for them."""

    def __init__(self, problem: Problem, index: int) -> None:
        groups = {i: g for i, g in enumerate(problem.groups) if g.bucket == index}
        self._choices = {i: group.choices for i, group in groups.items()}
        self._loss = {i: [loss(g, choice) for choice in g.choices] for i, g in groups.items()}
        self._seconds = {
            i: [sending_seconds(problem, c) + math.fsum(c.local_seconds) for c in group.choices]
            for i, group in groups.items()
        }
        self._fixed: dict[int, float] = {}
        for choice in (choice for group in groups.values() for choice in group.choices):
            fixed = problem.overheads[choice.hook] + latency_seconds(problem, choice)
            self._fixed[choice.hook] = max(fixed, self._fixed.get(choice.hook, 0.0))
        self.picked = {i: group.choices.index(group.exact) for i, group in groups.items()}

    def seconds(self, picked: Mapping[int, int]) -> float:
        hooks = {self._choices[i][position].hook for i, position in picked.items()}
        growing = math.fsum(self._seconds[i][position] for i, position in picked.items())
        return growing + math.fsum(self._fixed[hook] for hook in hooks)

    def moves(self) -> Iterator[_Move]:
        """Yield the moves that save seconds."""
        before = self.seconds(self.picked)
        for picks in self._changes():
            given = math.fsum(self._loss[i][p] - self._loss[i][self.picked[i]] for i, p in picks)
            saved = before - self.seconds(self.picked | dict(picks))
            if saved > 0:
                yield _Move(saved, given, dict(picks))

    def _changes(self) -> Iterator[list[tuple[int, int]]]:
        """Yield other choices for each group alone, and one hook for all or those of one hook."""
        others = [
            (i, position, choice.hook)
            for i, choices in self._choices.items()
            for position, choice in enumerate(choices)
            if choice.error < 1 and position != self.picked[i]
        ]
        yield from ([(i, position)] for i, position, _ in others)
        former = {i: self._choices[i][position].hook for i, position in self.picked.items()}
        kinds = sorted(set(former.values()))
        for hook in self._fixed:
            for only in (None, *(kinds if len(kinds) > 1 else ())):
                some = [(i, p) for i, p, h in others if h == hook and only in (None, former[i])]
                if len(some) > 1:
                    yield some


def _way(problem: Problem, by: _Value) -> Iterator[Assignment]:
    """Yield exact averages, and the assignment after each move."""
    left = problem.error**2 * math.fsum(group.norm**2 for group in problem.groups)
    buckets = [_Bucket(problem, i) for i in range(len(problem.buckets))]
    moves = [sorted(bucket.moves(), key=by, reverse=True) for bucket in buckets]
    assignment = list(exact(problem))
    yield tuple(assignment)
    for _ in range(4 * len(problem.groups)):  # each is moved a few times at most
        late = range(_first_late(problem, buckets), len(buckets))
        best = {i: next((m for m in moves[i] if m.loss <= left), None) for i in late}
        allowed = [(move, i) for i, move in best.items() if move is not None]
        if not allowed:
            return
        move, i = max(allowed, key=lambda pair: by(pair[0]))
        buckets[i].picked |= move.picks
        moves[i] = sorted(buckets[i].moves(), key=by, reverse=True)
        left -= move.loss
        for group, position in move.picks.items():
            assignment[group] = position
        yield tuple(assignment)


def _first_late(problem: Problem, buckets: list[_Bucket]) -> int:
    """Return the last bucket that begins as soon as backward has completed it."""
    finish = ready = 0.0
    first = 0
    for i, (bucket, times) in enumerate(zip(buckets, problem.buckets, strict=True)):
        ready += times.backward_seconds
        if finish <= ready:
            first = i
        finish = max(finish, ready) + bucket.seconds(bucket.picked)
    return first
