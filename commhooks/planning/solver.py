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
_HIDDEN = 0.02
"""A group that exposes a smaller part of its communication is hidden."""
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
    reason = _why_exact(problem)
    if reason:
        return plan_of(problem, plain, reason)
    search = _Search(problem)
    best = search.best([plain, *proposals(problem), *_uniform_plans(problem)])
    used = _assignment_of(problem, in_use)
    if used is None or not is_within_limit(problem, used):
        return search.plan(best, plain, "plain averaging")
    if search.seconds(plain) <= search.seconds(used) * (1 + _TIE):
        used = plain
    return search.plan(search.best([best, used]), used, "the plan in use")


def replayed(problem: Problem, assignment: Assignment, spans: list[Span] | None = None) -> Timing:
    """Return the time of a step on the timeline; append what happens in it to ``spans``."""
    trace = step_trace(problem, assignment)
    return replay(trace, problem.network, problem.backend, problem.cores, spans)


def plan_of(problem: Problem, assignment: Assignment, reason: str) -> Plan:
    """Return the plan of an assignment."""
    spans: list[Span] = []
    after = replayed(problem, assignment, spans)
    return Plan(
        rows=_rows(problem, assignment, after, spans),
        before=replayed(problem, exact(problem)),
        after=after,
        error=relative_error(problem, assignment),
        limit=problem.error,
        reason=reason,
    )


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
    measured = sum(bucket.backward_seconds for bucket in problem.buckets)
    if assignment is None or not measured > 0:
        return problem
    found, share = problem, 1.0
    for _ in range(_ITERATIONS):
        share = min(share * measured / _launched(found, assignment), 1.0)
        found = replace(
            problem,
            buckets=tuple(
                replace(bucket, backward_seconds=bucket.backward_seconds * share)
                for bucket in problem.buckets
            ),
        )
    return found


def _launched(problem: Problem, assignment: Assignment) -> float:
    """Return when the last bucket is launched on the timeline."""
    spans: list[Span] = []
    replayed(problem, assignment, spans)
    return max(span.end for span in spans if span.work == "backward")


class _Search:
    """Compares assignments on the timeline. Each is replayed once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._seconds: dict[Assignment, float] = {}

    def seconds(self, assignment: Assignment) -> float:
        """Return the seconds of a step."""
        if assignment not in self._seconds:
            self._seconds[assignment] = replayed(self._problem, assignment).step_seconds
        return self._seconds[assignment]

    def best(self, assignments: list[Assignment]) -> Assignment:
        """Return the most exact of the fastest."""
        soonest = min(map(self.seconds, assignments))
        fastest = [a for a in assignments if self.seconds(a) <= soonest * (1 + _TIE)]
        return min(fastest, key=lambda a: (relative_error(self._problem, a), self.seconds(a), a))

    def plan(self, best: Assignment, used: Assignment, name: str) -> Plan:
        """Return the plan to use: ``best``, or ``used`` unless it is slower by 5 %."""
        saved = 1 - self.seconds(best) / self.seconds(used)
        if best == used or saved < LEAST_SAVING:
            least = f"no other saves {LEAST_SAVING:.0%} of a step"
            return plan_of(self._problem, used, f"Keep {name}: {least}.")
        return plan_of(self._problem, best, f"Saves {saved:.0%} of a step over {name}.")


def _why_exact(problem: Problem) -> str:
    """Return why there is nothing to choose, or an empty text."""
    others = [
        (group, choice) for group in problem.groups for choice in group.choices if choice.error > 0
    ]
    if problem.network.size == 1:
        return "Average exactly: there is one rank, so nothing is sent."
    if all(len(group.choices) == 1 for group in problem.groups):
        return "Average exactly: there is no other candidate."
    if any(_fits(problem, *pair) for pair in others) or any(
        sum(choice.error == 0 for choice in group.choices) > 1 for group in problem.groups
    ):
        return ""
    group, choice = min(others, key=lambda pair: (loss(*pair), pair[1].error))
    return (
        f"Average exactly: no other candidate keeps the error within {problem.error:.3g}; the "
        f"nearest, {problem.hooks[choice.hook]}, has {choice.error:.3g} on {group.label}."
    )


def _fits(problem: Problem, group: Group, choice: Choice) -> bool:
    alone = tuple(
        each.choices.index(choice if each is group else each.exact) for each in problem.groups
    )
    return is_within_limit(problem, alone)


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


def _rows(
    problem: Problem, assignment: Assignment, timing: Timing, spans: list[Span]
) -> tuple[Row, ...]:
    """Return a row for each group.

    The time of a bucket's hooks and collectives before the end of backward's last bucket is hidden,
    the rest is exposed, scaled so that all buckets together expose what the step does. Groups of a
    bucket share both in proportion to the seconds that they need alone.
    """
    end = max((span.end for span in spans if span.work == "backward"), default=0.0)
    hidden, exposed = _by_bucket(spans, end)
    scale = timing.exposed_seconds / max(math.fsum(exposed.values()), 1e-30)
    alone = [_alone(problem, choice) for _, choice in chosen(problem, assignment)]
    rows = []
    for i, (group, choice) in enumerate(chosen(problem, assignment)):
        share = _share(problem, alone, i)
        before = share * hidden.get(group.bucket, 0.0)
        after = share * exposed.get(group.bucket, 0.0) * scale
        rows.append(
            Row(
                names=group.names,
                label=group.label,
                bucket=group.bucket,
                hook=problem.hooks[choice.hook],
                elements=group.elements,
                wire_bytes=math.fsum(
                    c.wire_bytes(problem.network.nodes) for c in choice.collectives
                ),
                error=choice.error,
                norm=group.norm,
                hidden_seconds=before,
                exposed_seconds=after,
                why=_why(problem, group, choice, is_hidden=after <= _HIDDEN * (before + after)),
            )
        )
    return tuple(rows)


def _by_bucket(spans: list[Span], end: float) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """Return the seconds of each bucket's hooks and collectives before and after ``end``."""
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    for span in spans:
        if span.work in ("backward", "unpack", "vote"):
            continue
        early = max(0.0, min(span.end, end) - span.start)
        before[span.bucket] = before.get(span.bucket, 0.0) + early
        after[span.bucket] = after.get(span.bucket, 0.0) + span.end - span.start - early
    return before, after


def _share(problem: Problem, alone: list[float], position: int) -> float:
    bucket = problem.groups[position].bucket
    same = [s for s, group in zip(alone, problem.groups, strict=True) if group.bucket == bucket]
    total = math.fsum(same)
    return alone[position] / total if total > 0 else 1 / len(same)


def _why(problem: Problem, group: Group, choice: Choice, *, is_hidden: bool) -> str:
    if len(group.choices) == 1:
        return "only candidate"
    if choice.error == 0:
        return "backward hides it" if is_hidden else "others save too little"
    plain = _alone(problem, group.exact)
    saved = plain - _alone(problem, choice)
    return f"saves {saved / plain:.0%}" if plain > 0 else "nothing to save"


def _alone(problem: Problem, choice: Choice) -> float:
    return sending_seconds(problem, choice) + math.fsum(choice.local_seconds)
