"""Plans that ``auto`` is compared with, made from what it has measured."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from commhooks.costs.timeline import Timing, replay
from commhooks.planning import Choice, Plan, Problem
from commhooks.planning.assignment import (
    Assignment,
    chosen,
    exact,
    relative_error,
    step_trace,
    uniform,
)
from commhooks.planning.rows import rows_of
from commhooks.planning.solver import is_within_limit
from commhooks.planning.tables import GRID, tables_of

__all__ = ["fewest_bytes", "plan_of", "predicted", "random_of_bytes", "sent_bytes"]

_NEAR = 0.02


def fewest_bytes(problem: Problem) -> Assignment:
    """Return the assignment within the limit that sends least, as L-GreCo chooses it.

    By a dynamic program over groups and discretized errors: arXiv:2210.17357, algorithm 1. Errors
    are rounded up, so uniform assignments, which may be just at the limit, are compared as well.
    """
    uniforms = [uniform(problem, hook) for hook in range(len(problem.hooks))]
    allowed = [each for each in uniforms if is_within_limit(problem, each)]
    return min([_by_program(problem), *allowed], key=lambda each: sent_bytes(problem, each))


def _by_program(problem: Problem) -> Assignment:
    groups = [group for table in tables_of(problem) for group in table.groups]
    least = np.full(GRID + 1, math.inf)
    least[0] = 0.0
    best = []
    for group in groups:
        options = np.full((len(group.picks), GRID + 1), math.inf)
        for i, (pick, units) in enumerate(zip(group.picks, group.units, strict=True)):
            cost = _bytes(problem, problem.groups[group.group].choices[pick])
            options[i, units:] = least[: GRID + 1 - units] + cost
        best.append(options.argmin(0))
        least = options.min(0)
    left = int(least.argmin())
    found = list(exact(problem))
    for group, picks in zip(reversed(groups), reversed(best), strict=True):
        pick = picks[left]
        found[group.group] = int(group.picks[pick])
        left -= int(group.units[pick])
    return tuple(found)


def random_of_bytes(problem: Problem, nbytes: float, seed: int) -> Assignment:
    """Return a random assignment that sends about ``nbytes``, whatever its error.

    A random one changes in random places while that brings it nearer, until it is within 2 %.
    """
    draw = random.Random(seed)
    options = [[i for i, c in enumerate(g.choices) if c.error < 1] for g in problem.groups]
    found = [draw.choice(each) for each in options]
    for _ in range(20_000):
        distance = abs(sent_bytes(problem, found) - nbytes)
        if distance <= _NEAR * nbytes:
            break
        position = draw.randrange(len(found))
        former, found[position] = found[position], draw.choice(options[position])
        if abs(sent_bytes(problem, found) - nbytes) > distance:
            found[position] = former
    return tuple(found)


def sent_bytes(problem: Problem, assignment: Sequence[int]) -> float:
    """Return the bytes that a rank sends in a step."""
    return math.fsum(_bytes(problem, c) for _, c in chosen(problem, tuple(assignment)))


def predicted(problem: Problem, assignment: Assignment) -> Timing:
    """Return the time of a step on the timeline."""
    trace = step_trace(problem, assignment)
    return replay(trace, problem.network, problem.backend, problem.cores)


def plan_of(problem: Problem, assignment: Assignment, reason: str) -> Plan:
    """Return a plan that ``auto`` can be given."""
    return Plan(
        rows=rows_of(problem, assignment),
        before=predicted(problem, exact(problem)),
        after=predicted(problem, assignment),
        error=relative_error(problem, assignment),
        limit=problem.error,
        reason=reason,
    )


def _bytes(problem: Problem, choice: Choice) -> float:
    return math.fsum(c.wire_bytes(problem.network.nodes) for c in choice.collectives)
