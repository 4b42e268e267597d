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

from commhooks.planning.problem import Assignment, Choice, Problem

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
    """Other choices for some groups of a bucket, by the positions of the groups."""

    saved: float
    loss: float
    picks: Mapping[int, Choice]


_Value = Callable[[_Move], tuple[float, float]]


def _per_error(move: _Move) -> tuple[float, float]:
    return (move.saved / move.loss if move.loss > 0 else math.inf), move.saved


def _seconds_alone(move: _Move) -> tuple[float, float]:
    """Prefer large groups: if small ones come first, the limit may not suffice for them."""
    return move.saved, -move.loss


class _Bucket:
    """The groups of a bucket by their positions, and the choices picked for them."""

    def __init__(self, problem: Problem, index: int) -> None:
        self._groups = {i: g for i, g in enumerate(problem.groups) if g.bucket == index}
        self.picked = {i: group.exact for i, group in self._groups.items()}
        self._growing: dict[tuple[int, int], float] = {}
        self._fixed: dict[int, float] = {}
        for i, choice in ((i, c) for i, group in self._groups.items() for c in group.choices):
            self._growing[i, choice.hook] = problem.sending_seconds(choice) + choice.seconds
            fixed = problem.fixed_seconds(choice)
            self._fixed[choice.hook] = max(fixed, self._fixed.get(choice.hook, 0.0))

    def seconds(self, picked: Mapping[int, Choice]) -> float:
        growing = math.fsum(self._growing[i, choice.hook] for i, choice in picked.items())
        return growing + math.fsum(self._fixed[h] for h in {c.hook for c in picked.values()})

    def moves(self) -> Iterator[_Move]:
        """Yield the moves that save seconds."""
        before = self.seconds(self.picked)
        for picks in self._changes():
            given = math.fsum(
                self._groups[i].loss(choice) - self._groups[i].loss(self.picked[i])
                for i, choice in picks.items()
            )
            saved = before - self.seconds(self.picked | picks)
            if saved > 0:
                yield _Move(saved, given, picks)

    def _changes(self) -> Iterator[dict[int, Choice]]:
        """Yield other choices for each group alone, and one hook for all or those of one hook."""
        others = [
            (i, choice)
            for i, group in self._groups.items()
            for choice in group.choices
            if choice.error < 1 and choice.hook != self.picked[i].hook
        ]
        yield from ({i: choice} for i, choice in others)
        kinds = sorted({choice.hook for choice in self.picked.values()})
        for hook in self._fixed:
            for only in (None, *(kinds if len(kinds) > 1 else ())):
                some = {
                    i: choice
                    for i, choice in others
                    if choice.hook == hook and only in (None, self.picked[i].hook)
                }
                if len(some) > 1:
                    yield some


def _way(problem: Problem, by: _Value) -> Iterator[Assignment]:
    """Yield exact averages, and the assignment after each move."""
    left = problem.allowed_loss
    buckets = [_Bucket(problem, i) for i in range(len(problem.buckets))]
    moves = [sorted(bucket.moves(), key=by, reverse=True) for bucket in buckets]
    assignment = dict(enumerate(problem.exact))
    yield problem.exact
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
        assignment |= move.picks
        yield tuple(assignment.values())


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
