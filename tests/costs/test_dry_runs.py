"""Dry runs of a few sizes, extrapolated to others."""

import pytest

from commhooks import CommHookError
from commhooks.costs.dry_runs import DryRuns, dry_run_sizes
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace

SIZES = [2, 4, 32]
ALL = Members(1, spans_nodes=True)


def step_trace(size: int, *operations: str) -> StepTrace:
    collectives = tuple(Collective(name, 1000.0, ALL) for name in operations)
    local = (0.001 * size,) * (len(operations) + 1)
    return StepTrace((BucketTrace(1000, 1.0, 0.0, local, collectives),), 0.5, is_native=False)


def test_only_other_sizes_are_extrapolated():
    runs = DryRuns({n: [(1.0, step_trace(n, "all_reduce"))] for n in SIZES}, 1)
    off_the_line = step_trace(100, "all_reduce")
    assert DryRuns({**runs.by_size, 4: [(1.0, off_the_line)]}, 1).at(4) == [(1.0, off_the_line)]
    ((share, larger),) = runs.at(1000)
    assert share == 1.0
    assert larger.buckets[0].local_seconds == pytest.approx((1.0, 1.0))
    assert larger.buckets[0].collectives == step_trace(1000, "all_reduce").buckets[0].collectives


def test_a_single_node_is_not_extrapolated_to_several():
    by_size = {n: [(1.0, step_trace(n, "all_reduce"))] for n in (4, 8, 64)}
    inside = {2: [(1.0, step_trace(2))]}  # no collectives between nodes
    assert DryRuns(inside | by_size, 2).at(1000) == DryRuns(by_size, 2).at(1000)


def test_a_hook_whose_collectives_depend_on_the_size_is_not_extrapolated():
    by_size = {n: [(1.0, step_trace(n, *["all_reduce"] * (n // 2)))] for n in SIZES}
    with pytest.raises(CommHookError, match="among 1000 ranks"):
        DryRuns(by_size, 1).at(1000)


def test_dry_runs_survive_json():
    runs = DryRuns({n: [(1.0, step_trace(n, "all_gather"))] for n in SIZES}, 1)
    assert DryRuns.from_json(runs.to_json()) == runs


@pytest.mark.parametrize(
    ("size", "ranks_per_node", "expected"),
    [
        (4096, 1, [2, 4, 32]),
        (3, 1, [2, 3, 4, 32]),
        (4096, 8, [16, 32, 64]),
        (8, 8, [8, 16, 32, 64]),
    ],
)
def test_sizes_of_dry_runs(size, ranks_per_node, expected):
    assert dry_run_sizes([size], ranks_per_node) == expected
