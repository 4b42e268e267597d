"""The seconds of a choice as a sum: those of each run of a hook, and those of each group.

::

    overhead + latency of the collectives        once, if any group of the bucket chose the hook
    local seconds + bytes / rate                 for each group

The program needs such a sum. The timeline, which decides, does not use it.
"""

import math

from commhooks.costs.step_trace import Collective
from commhooks.planning.problem import Choice, Problem

__all__ = ["latency_seconds", "sending_seconds"]


def latency_seconds(problem: Problem, choice: Choice) -> float:
    """Return the time of collectives that send nothing."""
    return math.fsum(_seconds(problem, _empty(c)) for c in choice.collectives)


def sending_seconds(problem: Problem, choice: Choice) -> float:
    """Return the time that the bytes of a group add to its collectives."""
    return math.fsum(
        _seconds(problem, collective) - _seconds(problem, _empty(collective))
        for collective in choice.collectives
    )


def _empty(collective: Collective) -> Collective:
    return Collective(collective.operation, 0.0, collective.members)


def _seconds(problem: Problem, collective: Collective) -> float:
    """Return the time of a collective that shares nothing with others."""
    network = problem.network
    cost = problem.backend.cost(collective, network)
    return cost.latency_seconds + max(
        cost.link_bytes / network.link.bytes_per_second,
        cost.node_bytes / network.node_link.bytes_per_second,
        cost.cpu_seconds,
    )
