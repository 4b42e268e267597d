"""Chooses a hook for each group: a step as short as possible within a limit of error.

A greedy rule proposes (greedy.py). The timeline, which knows stages, cores and shared links,
decides among its proposals, all uniform plans, plain averaging and the plan in use.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from commhooks.costs.timeline import Span, Timing, replay
from commhooks.planning.greedy import proposals
from commhooks.planning.plan import Plan, Row
from commhooks.planning.problem import (
    Assignment,
    Choice,
    Group,
    Problem,
    chosen,
    exact,
    latency_seconds,
    loss,
    relative_error,
    sending_seconds,
    step_trace,
    uniform,
)

__all__ = [
    "LEAST_SAVING",
    "is_within_limit",
    "plan_of",
    "replayed",
    "solve",
    "timelines",
    "without_contention",
]

LEAST_SAVING = 0.05
"""The part of a step that a plan saves over the one in use, or it is not taken."""
_TIE = 1e-2
"""Steps whose times differ by a smaller part are as long as each other: the timeline is not more
accurate than that, and a faster plan must not cost much error for so little."""
_ROUNDING = 1e-9
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
    plain = exact(problem)
    if reason := _why_exact(problem):
        return plan_of(problem, plain, reason)
    used, name = _assignment_of(problem, in_use), "the plan in use"
    candidates = [plain, *proposals(problem), *_uniform_plans(problem)]
    if used is None or not is_within_limit(problem, used):
        used, name = plain, "plain averaging"
    candidates.append(used)
    seconds = {each: replayed(problem, each).step_seconds for each in candidates}
    if seconds[plain] <= seconds[used] * (1 + _TIE):
        used = plain
    soonest = min(seconds.values()) * (1 + _TIE)
    fastest = [each for each in seconds if seconds[each] <= soonest]
    best = min(fastest, key=lambda each: (relative_error(problem, each), seconds[each], each))
    saved = 1 - seconds[best] / seconds[used]
    if best == used or saved < LEAST_SAVING:
        least = f"no other saves {LEAST_SAVING:.0%} of a step"
        return plan_of(problem, used, f"Keep {name}: {least}.")
    return plan_of(problem, best, f"Saves {saved:.0%} of a step over {name}.")


def replayed(problem: Problem, assignment: Assignment, spans: list[Span] | None = None) -> Timing:
    """Return the time of a step on the timeline; append what happens in it to ``spans``."""
    trace = step_trace(problem, assignment)
    return replay(trace, problem.network, problem.backend, problem.cores, spans)


def plan_of(problem: Problem, assignment: Assignment, reason: str) -> Plan:
    """Return the plan of an assignment."""
    return Plan(
        rows=tuple(_row(problem, *pair) for pair in chosen(problem, assignment)),
        before=replayed(problem, exact(problem)),
        after=replayed(problem, assignment),
        error=relative_error(problem, assignment),
        limit=problem.error,
        reason=reason,
    )


def _row(problem: Problem, group: Group, choice: Choice) -> Row:
    seconds, plain = _alone(problem, choice), _alone(problem, group.exact)
    if len(group.choices) == 1:
        why = "only candidate"
    elif choice.error == 0:
        why = "others save too little"
    else:
        why = f"saves {1 - seconds / plain:.0%}" if plain > 0 else "nothing to save"
    return Row(
        names=group.names,
        bucket=group.bucket,
        hook=problem.hooks[choice.hook],
        elements=group.elements,
        wire_bytes=math.fsum(c.wire_bytes(problem.network.nodes) for c in choice.collectives),
        seconds=seconds,
        error=choice.error,
        norm=group.norm,
        why=why,
    )


def _alone(problem: Problem, choice: Choice) -> float:
    """Return the seconds of a choice that overlaps with nothing."""
    overhead = problem.overheads[choice.hook] + latency_seconds(problem, choice)
    return overhead + sending_seconds(problem, choice) + math.fsum(choice.local_seconds)


def is_within_limit(problem: Problem, assignment: Assignment) -> bool:
    """Return whether the error is allowed, and that of each group is below 1."""
    return relative_error(problem, assignment) <= problem.error * (1 + _ROUNDING) and all(
        choice.error < 1 for _, choice in chosen(problem, assignment)
    )


def timelines(problem: Problem, plan: Plan) -> tuple[list[Span], list[Span]]:
    """Return what happens in a step with plain averaging, and with a plan for this problem."""
    assignment = _assignment_of(problem, plan.hook_of())
    if assignment is None:
        raise ValueError("the plan was made for another problem")
    before, after = list[Span](), list[Span]()
    replayed(problem, exact(problem), before)
    replayed(problem, assignment, after)
    return before, after


def without_contention(problem: Problem, in_use: Mapping[str, str] | None) -> Problem:
    """Return ``problem`` with the launches of a backward that shares its cores with nothing.

    They were measured beside the hooks in use and their messages, which the timeline adds once
    more. So all are made shorter, until with these hooks the timeline launches the last bucket
    when it was measured. ``in_use`` is as in :func:`solve`.
    """
    assignment = exact(problem) if in_use is None else _assignment_of(problem, in_use)
    measured = math.fsum(bucket.backward_seconds for bucket in problem.buckets)
    if assignment is None or not measured > 0:
        return problem
    found, share = problem, 1.0
    for _ in range(_ITERATIONS):
        spans: list[Span] = []
        replayed(found, assignment, spans)
        launched = max(span.end for span in spans if span.work == "backward")
        share = min(share * measured / launched, 1.0)
        found = replace(
            problem,
            buckets=tuple(
                replace(bucket, backward_seconds=bucket.backward_seconds * share)
                for bucket in problem.buckets
            ),
        )
    return found


def _why_exact(problem: Problem) -> str:
    """Return why there is nothing to choose, or an empty text."""
    others = [
        (group, choice) for group in problem.groups for choice in group.choices if choice.error > 0
    ]
    if problem.network.size == 1:
        return "Average exactly: there is one rank, so nothing is sent."
    if all(len(group.choices) == 1 for group in problem.groups):
        return "Average exactly: there is no other candidate."
    allowed = problem.error**2 * math.fsum(group.norm**2 for group in problem.groups)
    if len(others) < sum(len(group.choices) - 1 for group in problem.groups) or any(
        choice.error < 1 and loss(group, choice) <= allowed * (1 + _ROUNDING)
        for group, choice in others
    ):
        return ""
    group, choice = min(others, key=lambda pair: (loss(*pair), pair[1].error))
    return (
        f"Average exactly: no other candidate keeps the error within {problem.error:.3g}; the "
        f"nearest, {problem.hooks[choice.hook]}, has {choice.error:.3g} on {group.label}."
    )


def _uniform_plans(problem: Problem) -> Iterator[Assignment]:
    for hook in range(len(problem.hooks)):
        assignment = uniform(problem, hook)
        if is_within_limit(problem, assignment):
            yield assignment


def _assignment_of(problem: Problem, hooks: Mapping[str, str] | None) -> Assignment | None:
    """Return the assignment in which parameters have these hooks; None if there is none."""
    if hooks is None:
        return None
    positions = []
    for group in problem.groups:
        specs = {hooks.get(name) for name in group.names}
        found = [i for i, c in enumerate(group.choices) if {problem.hooks[c.hook]} == specs]
        if not found:
            return None
        positions.append(found[0])
    return tuple(positions)
