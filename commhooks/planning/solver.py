"""Chooses a hook for each group: a step as short as possible within a limit of error.

A greedy rule spends the limit where it saves most::

    while there is a move: make the one that saves most seconds per squared error

A move gives one group of a bucket, or all groups of one hook there, another hook. Only buckets
count that delay the end of the step: those since the link was last idle. Seconds are sums here:

    overhead + latency of the collectives        once, if any group of the bucket has the hook
    local seconds + bytes / rate                 for each group

The timeline, which knows stages, cores and shared links, decides among the assignments on the way,
all uniform plans, plain averaging and the plan in use.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from commhooks.planning.plan import GroupPlan, Plan, label_of
from commhooks.planning.problem import Assignment, Group, Problem

LEAST_SAVING = 0.05
"""The least part of a step that a plan must save over the one in use."""
_TIE = 1e-2
"""Steps whose times differ by a smaller part count as equally long: the timeline is not more
accurate, and a little time is not worth much error."""
_KEPT = 16
"""Assignments of each way that the timeline compares."""
_ITERATIONS = 6
"""Each leaves a share of the difference that is smaller than that of communication in backward."""


def solve(problem: Problem, in_use: Mapping[str, str] | None = None) -> Plan:
    """Return the plan for ``problem``; on all machines the same one for the same numbers.

    ``in_use`` maps names of parameters to the specs of their hooks. It stays unless another plan
    saves 5 % of a step, plain averaging is as fast, or it is no longer within the limit. Without
    it, plain averaging is in use.

    A plan has only choices with errors below 1: with error feedback, an error of at least 1 may
    grow from step to step.
    """
    plain = problem.uniform(problem.plain)
    if reason := _why_exact(problem):
        return make_plan(problem, plain, reason)
    used, name = problem.assignment(in_use or {}), "the plan in use"
    uniform = map(problem.uniform, problem.overheads)
    candidates = [plain, *proposals(problem), *filter(problem.allows, uniform)]
    if used is None or not problem.allows(used) or used == plain:
        used, name = plain, "plain averaging"
    candidates.append(used)
    seconds = {each: problem.replay(each).step_seconds for each in candidates}
    if seconds[plain] <= seconds[used] * (1 + _TIE):
        used = plain
    soonest = min(seconds.values()) * (1 + _TIE)
    fastest = [each for each in seconds if seconds[each] <= soonest]
    best = min(fastest, key=lambda each: (problem.error_of(each), seconds[each]))
    saved = 1 - seconds[best] / seconds[used]
    if best == used or saved < LEAST_SAVING:
        least = f"no other saves {LEAST_SAVING:.0%} of a step"
        return make_plan(problem, used, f"Keep {name}: {least}.")
    return make_plan(problem, best, f"Saves {saved:.0%} of a step over {name}.")


def _why_exact(problem: Problem) -> str:
    """Return why there is nothing to choose, or an empty text."""
    if problem.network.size == 1:
        return "Average exactly: there is one rank, so nothing is sent."
    others = [(g, hook) for g in problem.groups for hook in g.choices if hook != problem.plain]
    if not others:
        return "Average exactly: there is no other candidate."
    losses = [(g.choices[hook].error >= 1, g.loss(hook), hook, g) for g, hook in others]
    grows, loss, hook, group = min(losses, key=operator.itemgetter(0, 1))
    if not grows and loss <= problem.allowed_loss:
        return ""
    return (
        f"Average exactly: no other candidate keeps the error within {problem.error:.3g}; the "
        f"nearest, {hook}, has {group.choices[hook].error:.3g} on {label_of(group.names)}."
    )


def make_plan(problem: Problem, assignment: Assignment, reason: str) -> Plan:
    return Plan(
        rows=tuple(_row(problem, *p) for p in zip(problem.groups, assignment, strict=True)),
        before=problem.replay(problem.uniform(problem.plain)),
        after=problem.replay(assignment),
        error=problem.error_of(assignment),
        limit=problem.error,
        reason=reason,
    )


def _row(problem: Problem, group: Group, hook: str) -> GroupPlan:
    choice = group.choices[hook]
    alone, plain = (math.fsum(problem.costs(group, each)) for each in (hook, problem.plain))
    if len(group.choices) == 1:
        why = "only candidate"
    elif choice.error == 0:
        why = "others save too little"
    else:
        why = f"saves {1 - alone / plain:.0%}" if plain > 0 else "nothing to save"
    return GroupPlan(
        names=group.names,
        bucket=group.bucket,
        hook=hook,
        elements=group.elements,
        wire_bytes=math.fsum(c.wire_bytes(problem.network.nodes) for c in choice.collectives),
        seconds=alone,
        error=choice.error,
        norm=group.norm,
        why=why,
    )


def without_contention(problem: Problem, in_use: Mapping[str, str]) -> Problem:
    """Return ``problem`` with the launches of a backward that shares its cores with nothing.

    They were measured beside the hooks in use and their messages, which the timeline adds once
    more. So all are made shorter, until with these hooks the timeline launches the last bucket
    when it was measured. ``in_use`` is as in :func:`solve`.
    """
    measured = math.fsum(bucket.backward_seconds for bucket in problem.step.buckets)
    if problem.assignment(in_use) is None or not measured > 0:
        return problem
    found, share = problem, 1.0
    for _ in range(_ITERATIONS):
        launched = max(s.end for s in found.intervals(in_use) if s.work == "backward")
        share = min(share * measured / launched, 1.0)
        buckets = tuple(
            replace(bucket, backward_seconds=bucket.backward_seconds * share)
            for bucket in problem.step.buckets
        )
        found = replace(problem, step=replace(problem.step, buckets=buckets))
    return found


# ------------------------------------------------------------------------- the greedy rule


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
                contracts = group.choices[hook].error < 1
                self._contracted.setdefault(hook, []).extend([i] if contracts else [])

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
