"""A choice for each group of a problem: its error, and its step on the timeline."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

from commhooks.costs.step_trace import BucketTrace, Collective, StepTrace
from commhooks.planning.problem import Choice, Group, Problem

__all__ = [
    "Assignment",
    "chosen",
    "exact",
    "loss",
    "relative_error",
    "squared_error",
    "step_trace",
    "uniform",
]

Assignment: TypeAlias = tuple[int, ...]
"""For each group, the position of its choice in ``Group.choices``."""


def chosen(problem: Problem, assignment: Assignment) -> Iterator[tuple[Group, Choice]]:
    """Yield each group with its choice."""
    for group, position in zip(problem.groups, assignment, strict=True):
        yield group, group.choices[position]


def exact(problem: Problem) -> Assignment:
    """Return plain averaging."""
    return tuple(group.choices.index(group.exact) for group in problem.groups)


def uniform(problem: Problem, hook: int) -> Assignment:
    """Return one hook for all groups that it contracts; the others are averaged exactly."""
    return tuple(
        next(
            (i for i, choice in enumerate(g.choices) if choice.hook == hook and choice.error < 1),
            g.choices.index(g.exact),
        )
        for g in problem.groups
    )


def loss(group: Group, choice: Choice) -> float:
    """Return the group's part of the sum of squared errors."""
    return squared_error(choice.error, group.norm)


def squared_error(error: float, norm: float) -> float:
    """Return |average - exact|^2 of a hook with error feedback, after many steps.

    It averages p = g + r, where r is the error of the step before, so |r| = ``error`` |p|. If r
    does not depend on the gradient g, whose average has this ``norm``, |p|^2 = |g|^2 + |r|^2.
    """
    if norm == 0 or error == 0:
        return 0.0
    return (error * norm) ** 2 / (1 - error**2) if error < 1 else math.inf


def relative_error(problem: Problem, assignment: Assignment) -> float:
    """Return |average - exact| over all groups, relative to the norm of the average gradient."""
    total = math.fsum(group.norm**2 for group in problem.groups)
    lost = math.fsum(loss(*pair) for pair in chosen(problem, assignment))
    return math.sqrt(lost / total) if total else 0.0


def step_trace(problem: Problem, assignment: Assignment) -> StepTrace:
    """Return what a rank does in a step.

    The hooks of a bucket run one after the other, in the order of ``Problem.hooks``. A hook that
    several groups of a bucket chose runs once, with the sum of their bytes.
    """
    by_bucket: dict[int, list[Choice]] = {}
    for group, choice in chosen(problem, assignment):
        by_bucket.setdefault(group.bucket, []).append(choice)
    buckets = []
    for index, times in enumerate(problem.buckets):
        local, collectives = _bucket(problem, by_bucket.get(index, []))
        buckets.append(
            BucketTrace(
                gradient_bytes=times.gradient_bytes,
                backward_seconds=times.backward_seconds,
                unpack_seconds=times.unpack_seconds,
                local_seconds=local,
                collectives=collectives,
            )
        )
    return StepTrace(tuple(buckets), problem.forward_seconds, is_native=False)


@dataclass
class _Run:
    """One run of a hook."""

    local: list[float]
    collectives: list[Collective]

    def add(self, choice: Choice) -> bool:
        """Add a group to this run, if its collectives are alike."""
        alike = [(c.operation, c.members) for c in choice.collectives]
        if alike != [(c.operation, c.members) for c in self.collectives]:
            return False
        self.local = [a + b for a, b in zip(self.local, choice.local_seconds, strict=True)]
        self.collectives = [
            replace(own, tensor_bytes=own.tensor_bytes + other.tensor_bytes)
            for own, other in zip(self.collectives, choice.collectives, strict=True)
        ]
        return True


def _bucket(
    problem: Problem, choices: Sequence[Choice]
) -> tuple[tuple[float, ...], tuple[Collective, ...]]:
    local, collectives = [0.0], list[Collective]()
    in_order = sorted(choices, key=lambda choice: choice.hook)
    for hook, of_hook in groupby(in_order, key=lambda choice: choice.hook):
        runs: list[_Run] = []
        for choice in of_hook:
            if not any(run.add(choice) for run in runs):
                runs.append(_Run(list(choice.local_seconds), list(choice.collectives)))
        local[-1] += problem.overheads[hook]
        for run in runs:
            local[-1] += run.local[0]
            local += run.local[1:]
            collectives += run.collectives
    return tuple(local), tuple(collectives)
