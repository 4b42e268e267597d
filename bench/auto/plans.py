"""Plans that ``auto`` is compared with, made from what it has measured."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from commhooks.planning import Choice, Problem
from commhooks.planning.problem import Assignment, chosen, exact, loss, uniform
from commhooks.planning.solver import is_within_limit

__all__ = ["fewest_bytes", "random_of_bytes", "sent_bytes"]

_GRID = 1000
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
    unit = problem.error**2 * math.fsum(group.norm**2 for group in problem.groups) / _GRID
    least = np.full(_GRID + 1, math.inf)
    least[0] = 0.0
    best, units_of = [], []
    for group in problem.groups:
        options = np.full((len(group.choices), _GRID + 1), math.inf)
        units = [_units(loss(group, choice), unit) for choice in group.choices]
        for i, (choice, lost) in enumerate(zip(group.choices, units, strict=True)):
            if lost <= _GRID:
                options[i, lost:] = least[: _GRID + 1 - lost] + _bytes(problem, choice)
        best.append(options.argmin(0))
        units_of.append(units)
        least = options.min(0)
    left = int(least.argmin())
    found = list(exact(problem))
    for i in reversed(range(len(found))):
        found[i] = int(best[i][left])
        left -= units_of[i][found[i]]
    return tuple(found)


def _units(lost: float, unit: float) -> int:
    """Return an error in units, rounded up; more than the grid if it is not allowed."""
    if lost == 0:
        return 0
    return math.ceil(lost / unit) if lost <= _GRID * unit else _GRID + 1


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


def _bytes(problem: Problem, choice: Choice) -> float:
    return math.fsum(c.wire_bytes(problem.network.nodes) for c in choice.collectives)
