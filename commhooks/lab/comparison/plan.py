"""What a comparison does, task by task, so that it can tell how long the rest takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from commhooks.lab.comparison.entry import BARE, Entry

__all__ = ["VERIFIED_STEPS", "WARM_UP", "Task", "timing_tasks", "training_tasks", "verifying_tasks"]

WARM_UP = 2
"""Steps of a new wrapper that are not timed: after the first one, buckets are rebuilt."""
VERIFIED_STEPS = 1 + WARM_UP

_LEAST, _MOST = 12, 50
"""Timed steps in a block: warm-ups take little of the time, and an interrupt finds some."""
_VALIDATIONS = 10


@dataclass(frozen=True)
class Task:
    """Some consecutive steps of one entry."""

    kind: Literal["verifying", "measuring", "training"]
    entry: Entry
    steps: int
    done: int = 0
    """The steps of the same kind that the entry has made before."""

    @property
    def all_steps(self) -> int:
        """The steps including the warm-up."""
        return self.steps + (WARM_UP if self.kind == "measuring" else 0)


def verifying_tasks(entries: Sequence[Entry]) -> list[Task]:
    """Return a task for each entry."""
    return [Task("verifying", entry, VERIFIED_STEPS) for entry in entries]


def timing_tasks(entries: Sequence[Entry], steps: int) -> list[Task]:
    """Return the blocks of steps in which the entries take turns.

    Each entry has a block in each round. Every other round has the reverse order, and their number
    is even, so that a machine that steadily becomes slower or faster favors no entry.
    """
    rounds = 2 * math.ceil(steps / (2 * _MOST)) if steps >= 2 * _LEAST else 1
    ends = [steps * index // rounds for index in range(rounds + 1)]
    tasks = []
    for index in range(rounds):
        done = ends[index]
        size = ends[index + 1] - done
        order = entries if index % 2 == 0 else entries[::-1]
        tasks += [Task("measuring", entry, size, done) for entry in order]
    return tasks


def training_tasks(entries: Sequence[Entry], steps: int) -> list[Task]:
    """Return the trainings of all entries but the bare one, each in about ten parts."""
    stride = max(1, steps // _VALIDATIONS)
    starts = range(0, steps, stride)
    return [
        Task("training", entry, min(stride, steps - start), start)
        for entry in entries
        if entry != BARE
        for start in starts
    ]
