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

from commhooks.planning.problem import Assignment, Problem

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
    """Other hooks for some groups of a bucket, by the positions of the groups."""

    saved: float
    loss: float
    hooks: Mapping[int, str]


_Value = Callable[[_Move], tuple[float, float]]


def _per_error(move: _Move) -> tuple[float, float]:
    return (move.saved / move.loss if move.loss > 0 else math.inf), move.saved


def _seconds_alone(move: _Move) -> tuple[float, float]:
    """Prefer large groups: if small ones come first, the limit may not suffice for them."""
    return move.saved, -move.loss


class _Bucket:
    """The groups of a bucket by their positions, and the hooks picked for them."""

    def __init__(self, problem: Problem, index: int) -> None:
        self._groups = {i: g for i, g in enumerate(problem.groups) if g.bucket == index}
        self.picked = dict.fromkeys(self._groups, problem.plain)
        self._growing: dict[tuple[int, str], float] = {}
        self._fixed: dict[str, float] = {}
        self._contracted: dict[str, list[int]] = {}
        for i, group in self._groups.items():
            for hook in group.choices:
                fixed, self._growing[i, hook] = problem.costs(group, hook)
                self._fixed[hook] = max(fixed, self._fixed.get(hook, 0.0))
                contracted = self._contracted.setdefault(hook, [])
                contracted += [i] if group.choices[hook].error < 1 else []

    def seconds(self, hooks: Mapping[int, str]) -> float:
        growing = math.fsum(map(self._growing.__getitem__, hooks.items()))
        return growing + math.fsum(self._fixed[hook] for hook in {*hooks.values()})

    def moves(self, by: _Value) -> list[_Move]:
        """Return the moves that save seconds, the best first."""
        found, before = [], self.seconds(self.picked)
        for hooks in self._changes():
            groups = {i: self._groups[i] for i in hooks}
            loss = math.fsum(g.loss(hooks[i]) - g.loss(self.picked[i]) for i, g in groups.items())
            saved = before - self.seconds(self.picked | hooks)
            found += [_Move(saved, loss, hooks)] if saved > 0 else []
        return sorted(found, key=by, reverse=True)

    def _changes(self) -> Iterator[dict[int, str]]:
        """Yield another hook for each group alone, for those of one hook, and for all."""
        kinds = sorted({*self.picked.values()})
        some_kinds = [kinds, *([kind] for kind in kinds if len(kinds) > 1)]
        for hook in self._fixed:
            can = [i for i in self._contracted[hook] if self.picked[i] != hook]
            yield from ({i: hook} for i in can)
            for only in some_kinds:
                some = {i: hook for i in can if self.picked[i] in only}
                if len(some) > 1:
                    yield some


def _way(problem: Problem, by: _Value) -> Iterator[Assignment]:
    """Yield exact averages, and the assignment after each move."""
    left = problem.allowed_loss
    buckets = [_Bucket(problem, i) for i in range(len(problem.step.buckets))]
    moves = [bucket.moves(by) for bucket in buckets]
    assignment = dict.fromkeys(range(len(problem.groups)), problem.plain)
    yield tuple(assignment.values())
    for _ in range(4 * len(problem.groups)):  # each is moved a few times at most
        late = range(_first_late(problem, buckets), len(buckets))
        best = {i: next((m for m in moves[i] if m.loss <= left), None) for i in late}
        allowed = [(move, i) for i, move in best.items() if move is not None]
        if not allowed:
            return
        move, i = max(allowed, key=lambda pair: by(pair[0]))
        buckets[i].picked |= move.hooks
        moves[i] = buckets[i].moves(by)
        left -= move.loss
        assignment |= move.hooks
        yield tuple(assignment.values())


def _first_late(problem: Problem, buckets: list[_Bucket]) -> int:
    """Return the last bucket that begins as soon as backward has completed it."""
    finish = ready = 0.0
    first = 0
    for i, (bucket, times) in enumerate(zip(buckets, problem.step.buckets, strict=True)):
        ready += times.backward_seconds
        if finish <= ready:
            first = i
        finish = max(finish, ready) + bucket.seconds(bucket.picked)
    return first
