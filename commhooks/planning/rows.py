"""The rows of a plan: what each group sends, and what of it the step waits for."""

import math
from collections.abc import Mapping

from commhooks.costs.timeline import Span, replay
from commhooks.planning.assignment import Assignment, chosen, step_trace
from commhooks.planning.costs import sending_seconds
from commhooks.planning.problem import Choice, Group, Problem
from commhooks.planning.row import Row

__all__ = ["rows_of"]

_HIDDEN = 0.02
"""A group that exposes a smaller part of its communication is hidden."""


def rows_of(problem: Problem, assignment: Assignment) -> tuple[Row, ...]:
    """Return a row for each group.

    The time of a bucket's hooks and collectives before the end of backward's last bucket is hidden,
    the rest is exposed, scaled so that all buckets together expose what the step does. Groups of a
    bucket share both in proportion to the seconds that they need alone.
    """
    spans: list[Span] = []
    timing = replay(
        step_trace(problem, assignment), problem.network, problem.backend, problem.cores, spans
    )
    end = max((span.end for span in spans if span.work == "backward"), default=0.0)
    hidden, exposed = _by_bucket(spans, end)
    scale = timing.exposed_seconds / max(math.fsum(exposed.values()), 1e-30)
    alone = [_seconds(problem, choice) for _, choice in chosen(problem, assignment)]
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
    plain = _seconds(problem, group.exact)
    saved = plain - _seconds(problem, choice)
    return f"saves {saved / plain:.0%}" if plain > 0 else "nothing to save"


def _seconds(problem: Problem, choice: Choice) -> float:
    return sending_seconds(problem, choice) + math.fsum(choice.local_seconds)
