"""Chooses a hook for each group: a step as short as possible within a limit of error.

A greedy rule proposes (greedy.py). The timeline, which knows stages, cores and shared links,
decides among its proposals, all uniform plans, plain averaging and the plan in use.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import replace

from commhooks.planning.greedy import proposals
from commhooks.planning.plan import Plan, Row
from commhooks.planning.problem import Assignment, Group, Problem

LEAST_SAVING = 0.05
"""The part of a step that a plan saves over the one in use, or it is not taken."""
_TIE = 1e-2
"""Steps whose times differ by a smaller part are as long as each other: the timeline is not more
accurate than that, and a faster plan must not cost much error for so little."""
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
        return plan_of(problem, plain, reason)
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
        return plan_of(problem, used, f"Keep {name}: {least}.")
    return plan_of(problem, best, f"Saves {saved:.0%} of a step over {name}.")


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
        f"nearest, {hook}, has {group.choices[hook].error:.3g} on {group.label}."
    )


def plan_of(problem: Problem, assignment: Assignment, reason: str) -> Plan:
    """Return the plan of an assignment."""
    return Plan(
        rows=tuple(_row(problem, *p) for p in zip(problem.groups, assignment, strict=True)),
        before=problem.replay(problem.uniform(problem.plain)),
        after=problem.replay(assignment),
        error=problem.error_of(assignment),
        limit=problem.error,
        reason=reason,
    )


def _row(problem: Problem, group: Group, hook: str) -> Row:
    choice = group.choices[hook]
    alone, plain = (math.fsum(problem.costs(group, each)) for each in (hook, problem.plain))
    if len(group.choices) == 1:
        why = "only candidate"
    elif choice.error == 0:
        why = "others save too little"
    else:
        why = f"saves {1 - alone / plain:.0%}" if plain > 0 else "nothing to save"
    return Row(
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
        spans = found.spans(in_use)
        launched = max(span.end for span in spans if span.work == "backward")
        share = min(share * measured / launched, 1.0)
        buckets = tuple(
            replace(bucket, backward_seconds=bucket.backward_seconds * share)
            for bucket in problem.step.buckets
        )
        found = replace(problem, step=replace(problem.step, buckets=buckets))
    return found
