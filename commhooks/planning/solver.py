"""Chooses a hook for each group: a step as short as possible within a limit of error.

A dynamic program proposes (program.py). The timeline, which knows stages, cores and shared links,
decides among its proposals, all uniform plans, plain averaging and the plan in use.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from commhooks.costs.timeline import Span, Timing, replay
from commhooks.planning.assignment import (
    Assignment,
    chosen,
    exact,
    loss,
    relative_error,
    step_trace,
    uniform,
)
from commhooks.planning.plan import Plan
from commhooks.planning.problem import Choice, Group, Problem
from commhooks.planning.program import propose
from commhooks.planning.rows import rows_of

__all__ = ["solve", "timelines", "without_contention"]

_LEAST_SAVING = 0.05
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
    reason = _why_exact(problem)
    if reason:
        return _plan(problem, plain, reason)
    search = _Search(problem)
    best = search.best([plain, *propose(problem), *_uniform_plans(problem)])
    used = _assignment_of(problem, in_use)
    if used is None or not is_within_limit(problem, used):
        return search.plan(best, plain, "plain averaging")
    if search.seconds(plain) <= search.seconds(used) * (1 + _TIE):
        used = plain
    return search.plan(search.best([best, used]), used, "the plan in use")


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
    for each, spans in ((exact(problem), before), (assignment, after)):
        trace = step_trace(problem, each)
        replay(trace, problem.network, problem.backend, problem.cores, spans)
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
    trace = step_trace(problem, assignment)
    replay(trace, problem.network, problem.backend, problem.cores, spans)
    return max(span.end for span in spans if span.work == "backward")


class _Search:
    """Compares assignments on the timeline. Each is replayed once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._timings: dict[Assignment, Timing] = {}

    def seconds(self, assignment: Assignment) -> float:
        """Return the seconds of a step."""
        if assignment not in self._timings:
            problem = self._problem
            self._timings[assignment] = replay(
                step_trace(problem, assignment), problem.network, problem.backend, problem.cores
            )
        return self._timings[assignment].step_seconds

    def best(self, assignments: list[Assignment]) -> Assignment:
        """Return the most exact of the fastest."""
        soonest = min(map(self.seconds, assignments))
        fastest = [a for a in assignments if self.seconds(a) <= soonest * (1 + _TIE)]
        return min(fastest, key=lambda a: (relative_error(self._problem, a), self.seconds(a), a))

    def plan(self, best: Assignment, used: Assignment, name: str) -> Plan:
        """Return the plan to use: ``best``, or ``used`` unless it is slower by 5 %."""
        saved = 1 - self.seconds(best) / self.seconds(used)
        if best == used or saved < _LEAST_SAVING:
            least = f"no other saves {_LEAST_SAVING:.0%} of a step"
            return _plan(self._problem, used, f"Keep {name}: {least}.")
        return _plan(self._problem, best, f"Saves {saved:.0%} of a step over {name}.")


def _plan(problem: Problem, assignment: Assignment, reason: str) -> Plan:
    before, after = (
        replay(step_trace(problem, each), problem.network, problem.backend, problem.cores)
        for each in (exact(problem), assignment)
    )
    return Plan(
        rows=rows_of(problem, assignment),
        before=before,
        after=after,
        error=relative_error(problem, assignment),
        limit=problem.error,
        reason=reason,
    )


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
