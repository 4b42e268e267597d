"""Turns measurements into the problem of one network and limit."""

import math
from collections.abc import Sequence

from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace
from commhooks.lab.planning.measuring import Measured, MeasuredGroup
from commhooks.planning import Choice, Group, Problem

__all__ = ["error_of_hook", "problem_of"]


def error_of_hook(measured: Measured, hook: int) -> float:
    """Return the relative error of one hook for all parameters.

    Groups that it cannot average are averaged exactly.
    """
    total = math.fsum(group.norm**2 for group in measured.groups)
    lost = math.fsum(((g.cells[hook].error or 0.0) * g.norm) ** 2 for g in measured.groups)
    return math.sqrt(lost / total) if total else 0.0


def problem_of(
    measured: Measured,
    hooks: Sequence[str],
    network: Network,
    backend: Backend,
    *,
    cores: float,
    speed: float,
    error: float,
) -> Problem:
    """Return the problem of choosing from ``hooks``, the first of the measured ones.

    The ranks compute ``speed`` times as fast as this machine.
    """
    overheads = [_overhead(measured, hook) for hook in range(len(hooks))]
    return Problem(
        hooks=tuple(hooks),
        overheads=tuple(seconds / speed for seconds in overheads),
        groups=tuple(_group(group, overheads, speed) for group in measured.groups),
        buckets=tuple(
            BucketTrace(b.gradient_bytes, b.backward_seconds / speed, b.unpack_seconds / speed)
            for b in measured.buckets
        ),
        forward_seconds=measured.forward_seconds / speed,
        network=network,
        backend=backend,
        cores=cores,
        error=error,
    )


def _group(measured: MeasuredGroup, overheads: Sequence[float], speed: float) -> Group:
    choices, group = [], measured.group
    for hook, (cell, overhead) in enumerate(zip(measured.cells, overheads, strict=False)):
        if cell.error is None or cell.trace is None or (group.is_exact and hook > 0):
            continue
        total = math.fsum(cell.trace.local_seconds)
        growing = max(0.0, total - overhead) / total / speed if total else 0.0
        local = tuple(seconds * growing for seconds in cell.trace.local_seconds)
        choices.append(Choice(hook, local, cell.trace.collectives, cell.error))
    return Group(
        group.names, group.bucket, group.label, group.elements, measured.norm, tuple(choices)
    )


def _overhead(measured: Measured, hook: int) -> float:
    """Return the seconds of a run on nothing: on a line through the smallest and largest group."""
    known = sorted(
        (each.group.elements, math.fsum(trace.local_seconds))
        for each in measured.groups
        if (trace := each.cells[hook].trace) is not None
    )
    if not known or known[0][0] == known[-1][0]:
        return 0.0
    (least, shortest), (most, longest) = known[0], known[-1]
    at_zero = shortest - (longest - shortest) * least / (most - least)
    return min(shortest, max(0.0, at_zero))
