"""The assignments that end soonest, by a dynamic program over buckets and errors.

In launch order, ``finish_b = max(finish_(b-1), ready_b) + seconds_b`` is monotone in
``finish_(b-1)``, so the least finish for each sum of errors is enough.
"""

from collections.abc import Sequence

import numpy as np

from commhooks.planning.assignment import Assignment, exact
from commhooks.planning.bucket_fronts import Front, bucket_front
from commhooks.planning.problem import Problem
from commhooks.planning.tables import GRID, BucketTable, Floats, Ints, tables_of

__all__ = ["propose"]

_TOLERANCES = (1e-3, 2e-2)
"""How much later than the soonest a proposal may end, if its error is smaller."""
_LOCAL_WEIGHTS = (1.0, 0.0)
"""Local work delays the collectives of its bucket, but overlaps with those of other buckets."""


def propose(problem: Problem) -> list[Assignment]:
    """Return a few assignments within the limit that end early, the soonest first."""
    tables = tables_of(problem)
    found = [a for weight in _LOCAL_WEIGHTS for a in _solve(problem, tables, weight)]
    return list(dict.fromkeys(found))


def _solve(
    problem: Problem, tables: Sequence[BucketTable], local_weight: float
) -> list[Assignment]:
    finish = np.full(GRID + 1, np.inf)
    finish[0] = 0.0
    fronts, chosen = [], []
    for table in tables:
        front = bucket_front(table, local_weight)
        finish, best = _append(finish, front, table.ready)
        fronts.append(front)
        chosen.append(best)
    ends = [int(np.argmax(finish <= finish.min() * (1 + tolerance))) for tolerance in _TOLERANCES]
    return [_assignment(problem, tables, fronts, chosen, end) for end in ends]


def _append(finish: Floats, front: Front, ready: float) -> tuple[Floats, Ints]:
    """Return the least finish after one more bucket for each sum of errors, and how to get it.

    The second array has positions in the front. Ties go to the earlier ones, which have smaller
    errors.
    """
    started = np.maximum(finish, ready)
    least, best = np.full(GRID + 1, np.inf), np.zeros(GRID + 1, np.int64)
    for position, (units, seconds) in enumerate(zip(front.units, front.seconds, strict=True)):
        ended = started[: GRID + 1 - units] + seconds
        is_less = ended < least[units:]
        least[units:][is_less] = ended[is_less]
        best[units:][is_less] = position
    return least, best


def _assignment(
    problem: Problem,
    tables: Sequence[BucketTable],
    fronts: Sequence[Front],
    chosen: Sequence[Ints],
    units: int,
) -> Assignment:
    """Read the assignment with this sum of errors from the last bucket to the first."""
    assignment = list(exact(problem))
    for table, front, best in zip(
        reversed(tables), reversed(fronts), reversed(chosen), strict=True
    ):
        position = int(best[units])
        for group, pick in zip(table.groups, front.picks[position], strict=True):
            assignment[group.group] = int(pick)
        units -= int(front.units[position])
    return tuple(assignment)
