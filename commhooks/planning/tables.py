"""The usable choices of each group in arrays, for the program."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commhooks.planning.assignment import loss
from commhooks.planning.costs import latency_seconds, sending_seconds
from commhooks.planning.problem import Group, Problem

__all__ = ["GRID", "BucketTable", "Floats", "GroupTable", "Ints", "tables_of"]

GRID = 1000
"""Units of error in the limit. A plan may miss one unit per group that a finer grid could use."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GroupTable:
    """The choices of one group with errors below 1 and within the limit, in their order."""

    group: int
    """Its position in ``Problem.groups``."""
    picks: Ints
    """Positions in ``Group.choices``."""
    hooks: Ints
    units: Ints
    """Errors in units of the grid, rounded up."""
    lost: Floats
    """Errors, see :func:`loss`."""
    sending: Floats
    local: Floats


@dataclass(frozen=True)
class BucketTable:
    """The groups of one bucket, and the seconds of each hook for one run, whatever its size."""

    ready: float
    """When backward completes the bucket."""
    groups: tuple[GroupTable, ...]
    latencies: Floats
    overheads: Floats


def tables_of(problem: Problem) -> list[BucketTable]:
    """Return the tables of all buckets in order."""
    unit = problem.error**2 * math.fsum(group.norm**2 for group in problem.groups) / GRID
    tables = []
    ready = 0.0
    for index, bucket in enumerate(problem.buckets):
        ready += bucket.backward_seconds
        members = [i for i, group in enumerate(problem.groups) if group.bucket == index]
        latencies = np.zeros(len(problem.hooks))
        for choice in (c for i in members for c in problem.groups[i].choices):
            latency = latency_seconds(problem, choice)
            latencies[choice.hook] = max(latencies[choice.hook], latency)
        groups = tuple(_group(problem, i, unit) for i in members)
        tables.append(BucketTable(ready, groups, latencies, np.array(problem.overheads)))
    return tables


def _group(problem: Problem, position: int, unit: float) -> GroupTable:
    group = problem.groups[position]
    all_units = [_units(group, i, unit) for i in range(len(group.choices))]
    usable = [i for i, units in enumerate(all_units) if units is not None]
    choices = [group.choices[i] for i in usable]

    def ints(values: list[Any]) -> Ints:
        return np.array(values, np.int64)

    return GroupTable(
        group=position,
        picks=ints(usable),
        hooks=ints([choice.hook for choice in choices]),
        units=ints([all_units[i] for i in usable]),
        lost=np.array([loss(group, choice) for choice in choices]),
        sending=np.array([sending_seconds(problem, choice) for choice in choices]),
        local=np.array([math.fsum(choice.local_seconds) for choice in choices]),
    )


def _units(group: Group, position: int, unit: float) -> int | None:
    """Return the error of a choice in units; None if it is not allowed."""
    choice = group.choices[position]
    lost = loss(group, choice) if choice.error < 1 else math.inf
    if lost == 0:
        return 0
    return math.ceil(lost / unit) if lost <= GRID * unit and lost / unit <= GRID else None
