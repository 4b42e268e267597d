"""The solver against all plans of small problems, and its rules one by one."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning_problems import everyone, group, problem_of, random_problem, step_of

from commhooks.costs.backends import Gloo
from commhooks.costs.step_trace import Collective
from commhooks.costs.timeline import Interval
from commhooks.planning import Choice, Plan, Problem, solve
from commhooks.planning.problem import Assignment
from commhooks.planning.solver import proposals, without_contention

seeds = st.integers(0, 10_000)


def assignments(problem: Problem, limit: float) -> Iterator[Assignment]:
    """All assignments with errors within ``limit``, those of each group below 1."""
    for assignment in itertools.product(*(g.choices for g in problem.groups)):
        pairs = zip(problem.groups, assignment, strict=True)
        contracts = all(g.choices[hook].error < 1 for g, hook in pairs)
        if contracts and problem.error_of(assignment) <= limit:
            yield assignment


@pytest.mark.parametrize("seed", range(40))
def test_what_the_greedy_rule_proposes_is_within_5_percent_of_the_best(seed: int):
    problem = random_problem(seed, buckets=2, groups=2, hooks=4)
    allowed = set(assignments(problem, problem.error * (1 + 1e-9)))
    proposed = proposals(problem)
    assert problem.uniform(problem.plain) in proposed
    assert set(proposed) <= allowed
    best, found = (
        min(problem.replay(each).step_seconds for each in some) for some in (allowed, proposed)
    )
    assert found <= 1.05 * best


def test_a_large_group_is_not_left_exact_because_small_ones_have_used_up_the_limit():
    """Though they save more for their errors, for which a rule by that alone takes them first."""
    small = group("small", 10**5, half=half(10**5, 0.02, share=0.01))
    large = group("large", 10**7, half=half(10**7, 0.2))
    problem = problem_of(small, large, error=0.1444)
    both, one = (problem.error_of((small, "half")) for small in ("half", "allreduce"))
    assert both > problem.error > one
    assert specs(solve(problem)) == ["allreduce", "half"]


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_as_good_as_the_best_on_the_timeline_unless_that_saves_too_little(seed: int):
    problem = random_problem(seed, buckets=2, groups=2, hooks=3)

    allowed = assignments(problem, problem.error)
    best = min(problem.replay(each).step_seconds for each in allowed)
    assert solve(problem).after.step_seconds <= best * 1.01 / 0.95 * 1.001


@settings(max_examples=25)
@given(seeds)
def test_no_plan_leaves_the_limit(seed: int):
    plan = solve(random_problem(seed, buckets=4, groups=3, hooks=6))
    lost = sum((row.error * row.norm) ** 2 / (1 - row.error**2) for row in plan.rows)
    total = sum(row.norm**2 for row in plan.rows)
    assert math.sqrt(lost / total) == pytest.approx(plan.error)
    assert plan.error <= plan.limit * (1 + 1e-9)
    assert all(row.error < 1 for row in plan.rows)


def half(elements: int, error: float, share: float = 0.5) -> Choice:
    """A choice that sends a share of the bytes and computes nothing."""
    sent = Collective("all_reduce", 4 * elements * share, everyone)
    return Choice((0.0, 0.0), (sent,), error)


def specs(plan: Plan) -> list[str]:
    return [row.hook for row in plan.rows]


def test_an_error_of_1_or_more_is_never_chosen():
    small = group("small", 10**6, half=half(10**6, 1.0), norm=1e-6)
    large = group("large", 10**6, half=half(10**6, 0.01))
    problem = problem_of(small, large, error=0.1)
    assert specs(solve(problem)) == ["allreduce", "half"]
    fits = group("small", 10**6, half=half(10**6, 0.99), norm=1e-6)
    assert specs(solve(problem_of(fits, large, error=0.1))) == ["half", "half"]


def test_a_little_time_is_not_worth_an_error():
    last = group(
        "last", 10**7, half=half(10**7, 0.01), less=half(10**7, 0.09, share=0.49), bucket=0
    )
    problem = problem_of(last, error=0.1, hooks=("allreduce", "half", "less"), backward=(0.5,))
    assert specs(solve(problem)) == ["half"]


def test_communication_that_backward_hides_stays_exact():
    hidden = group("hidden", 10**7, half=half(10**7, 0.01), bucket=0)
    exposed = group("exposed", 10**7, half=half(10**7, 0.01), bucket=1)
    plan = solve(problem_of(hidden, exposed, error=0.1, backward=(0.01, 1.0)))
    assert specs(plan) == ["allreduce", "half"]
    assert plan.rows[0].why == "others save too little"
    assert plan.after.exposed_seconds == pytest.approx(plan.rows[1].seconds, rel=0.01)
    assert specs(solve(problem_of(hidden, exposed, error=0.1))) == ["half", "half"]


def test_of_equally_fast_plans_the_more_exact_is_taken():
    one = group("one", 10**6, half=half(10**6, 0.05), closer=half(10**6, 0.01))
    plan = solve(problem_of(one, error=0.1, hooks=("allreduce", "half", "closer")))
    assert specs(plan) == ["closer"]


@pytest.mark.parametrize(("share", "taken"), [(0.94, ["half"]), (0.955, ["allreduce"])])
def test_a_plan_is_taken_if_it_saves_a_twentieth_of_a_step(share: float, taken: list[str]):
    one = group("one", 10**7, half=half(10**7, 0.01, share=share))
    problem = problem_of(one, error=0.1, backward=(0.0,), forward=0.0)
    assert specs(solve(problem)) == taken


def test_a_plan_in_use_stays_unless_another_saves_a_twentieth_of_a_step():
    one = group("one", 10**7, half=half(10**7, 0.05, share=0.5), less=half(10**7, 0.05, share=0.49))
    problem = problem_of(one, error=0.1, hooks=("allreduce", "half", "less"))
    assert specs(solve(problem)) == ["less"]
    kept = solve(problem, {"one": "half"})
    assert specs(kept) == ["half"]
    assert "in use" in kept.reason
    assert specs(solve(problem, {"one": "unknown"})) == ["less"]


def test_a_plan_in_use_goes_when_it_is_no_longer_within_the_limit():
    one = group("one", 10**7, half=half(10**7, 0.05), closer=half(10**7, 0.01, share=0.9))
    problem = problem_of(one, error=0.02, hooks=("allreduce", "half", "closer"))
    assert specs(solve(problem, {"one": "half"})) == ["closer"]


def test_a_plan_in_use_goes_when_plain_averaging_is_as_fast():
    one = group("one", 10**6, half=half(10**6, 0.05), bucket=0)
    last = group("last", 1, bucket=1)
    problem = problem_of(one, last, error=0.1, backward=(0.01, 1.0))
    assert specs(solve(problem, {"one": "half", "last": "allreduce"})) == ["allreduce"] * 2


@pytest.mark.parametrize("in_use", [{}, {"a": "half", "b": "half"}])
def test_launches_that_were_measured_beside_messages_are_not_slowed_down_twice(
    in_use: dict[str, str],
):
    def launches(problem: Problem, assignment: Assignment) -> list[float]:
        intervals: list[Interval] = []
        problem.replay(assignment, intervals)
        return [interval.end for interval in intervals if interval.work == "backward"]

    two = (group(name, 10**7, half=half(10**7, 0.01), bucket=i) for i, name in enumerate("ab"))
    alone = replace(
        problem_of(*two, error=0.1, backward=(0.1, 0.1)),
        backend=Gloo(0.0, 0.0, byte_cpu_seconds=5e-9),
        cores=1.0,
    )
    picked = ("half", "half") if in_use else ("allreduce", "allreduce")
    first, last = launches(alone, picked)
    assert last > 2.2 * first  # the second bucket shares its core with the messages of the first
    buckets = [replace(bucket, backward_seconds=last / 2) for bucket in alone.step.buckets]
    measured = replace(alone, step=step_of(buckets, 0.01))
    found = without_contention(measured, in_use)
    assert launches(found, picked)[-1] == pytest.approx(last, rel=0.01)
    assert without_contention(replace(measured, cores=8.0), in_use).step == measured.step
    assert without_contention(measured, {"a": "unknown"}) == measured


def test_a_hook_that_several_groups_choose_runs_once():
    two = [group(name, 1000, half=half(1000, 0.01)) for name in "ab"]
    problem = replace(problem_of(*two, error=0.1), overheads={"allreduce": 0.5, "half": 0.25})
    (bucket,) = problem.step_trace(("half", "half")).buckets
    assert bucket.collectives == (Collective("all_reduce", 4000, everyone),)
    assert bucket.local_seconds == (0.25, 0.0)
    (bucket,) = problem.step_trace(("allreduce", "half")).buckets
    assert [each.tensor_bytes for each in bucket.collectives] == [4000, 2000]
    assert bucket.local_seconds == (0.5, 0.25, 0.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"error": 0.0}, "nearest, half, has 0.01 on one"),
        ({"error": 0.001}, "nearest, half, has 0.01 on one"),
        ({"network": 1}, "one rank"),
        ({"groups": 1}, "no other candidate"),
        ({"groups": 0}, "no other candidate"),
    ],
)
def test_what_cannot_be_chosen_is_averaged_exactly(change: dict[str, float], reason: str):
    one = group("one", 10**6, half=half(10**6, 0.01))
    problem = problem_of(one, error=change.get("error", 0.1))
    if "network" in change:
        problem = replace(problem, network=replace(problem.network, size=1))
    if "groups" in change:
        groups = (group("one", 10**6),) if change["groups"] else ()
        problem = replace(problem, groups=groups)
    plan = solve(problem)
    assert set(specs(plan)) <= {"allreduce"}
    assert plan.error == 0
    assert reason in plan.reason


def test_gradients_of_zeros_are_within_every_limit():
    plan = solve(problem_of(group("one", 10**6, half=half(10**6, 0.5), norm=0.0), error=0.1))
    assert specs(plan) == ["half"]
    assert plan.error == 0
