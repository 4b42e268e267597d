"""Chooses a hook for each group: a step as short as possible within a limit of error.

A greedy rule proposes (greedy.py). The timeline, which knows stages, cores and shared links,
decides among its proposals, all uniform plans, plain averaging and the plan in use.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from commhooks.costs.timeline import Span
from commhooks.planning.greedy import proposals
from commhooks.planning.plan import Plan, Row
from commhooks.planning.problem import Assignment, Choice, Group, Problem

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
    plain = problem.exact
    if reason := _why_exact(problem):
        return plan_of(problem, plain, reason)
    used, name = problem.assignment(in_use or {}), "the plan in use"
    uniform = map(problem.uniform, range(len(problem.hooks)))
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
    if all(len(group.choices) == 1 for group in problem.groups):
        return "Average exactly: there is no other candidate."
    others = [(g, c) for g in problem.groups for c in g.choices if c is not g.exact]
    allowed = problem.allowed_loss
    if any(c.error == 0 or (c.error < 1 and g.loss(c) <= allowed) for g, c in others):
        return ""
    group, choice = min(others, key=lambda pair: (pair[0].loss(pair[1]), pair[1].error))
    return (
        f"Average exactly: no other candidate keeps the error within {problem.error:.3g}; the "
        f"nearest, {problem.hooks[choice.hook]}, has {choice.error:.3g} on {group.label}."
    )


def plan_of(problem: Problem, assignment: Assignment, reason: str) -> Plan:
    """Return the plan of an assignment."""
    return Plan(
        rows=tuple(_row(problem, *p) for p in zip(problem.groups, assignment, strict=True)),
        before=problem.replay(problem.exact),
        after=problem.replay(assignment),
        error=problem.error_of(assignment),
        limit=problem.error,
        reason=reason,
    )


def _row(problem: Problem, group: Group, choice: Choice) -> Row:
    alone, plain = (
        problem.fixed_seconds(each) + problem.sending_seconds(each) + each.seconds
        for each in (choice, group.exact)
    )
    if len(group.choices) == 1:
        why = "only candidate"
    elif choice.error == 0:
        why = "others save too little"
    else:
        why = f"saves {1 - alone / plain:.0%}" if plain > 0 else "nothing to save"
    return Row(
        names=group.names,
        bucket=group.bucket,
        hook=problem.hooks[choice.hook],
        elements=group.elements,
        wire_bytes=math.fsum(c.wire_bytes(problem.network.nodes) for c in choice.collectives),
        seconds=alone,
        error=choice.error,
        norm=group.norm,
        why=why,
    )


def timelines(problem: Problem, plan: Plan) -> tuple[list[Span], list[Span]]:
    """Return what happens in a step with plain averaging, and with a plan for this problem."""
    assignment = problem.assignment(plan.hook_of())
    if assignment is None:
        raise ValueError("the plan was made for another problem")
    before, after = list[Span](), list[Span]()
    problem.replay(problem.exact, before)
    problem.replay(assignment, after)
    return before, after


def without_contention(problem: Problem, in_use: Mapping[str, str]) -> Problem:
    """Return ``problem`` with the launches of a backward that shares its cores with nothing.

    They were measured beside the hooks in use and their messages, which the timeline adds once
    more. So all are made shorter, until with these hooks the timeline launches the last bucket
    when it was measured. ``in_use`` is as in :func:`solve`.
    """
    assignment = problem.assignment(in_use)
    measured = math.fsum(bucket.backward_seconds for bucket in problem.buckets)
    if assignment is None or not measured > 0:
        return problem
    found, share = problem, 1.0
    for _ in range(_ITERATIONS):
        spans: list[Span] = []
        found.replay(assignment, spans)
        launched = max(span.end for span in spans if span.work == "backward")
        share = min(share * measured / launched, 1.0)
        buckets = (replace(b, backward_seconds=b.backward_seconds * share) for b in problem.buckets)
        found = replace(problem, buckets=tuple(buckets))
    return found
