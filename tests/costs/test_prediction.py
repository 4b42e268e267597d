"""Predictions from dry runs of a few sizes, extrapolated to others."""

import json
from dataclasses import asdict, replace

import pytest

from commhooks import CommHookError
from commhooks.costs.backends import NCCL
from commhooks.costs.network import Link, Network
from commhooks.costs.prediction import (
    DryRuns,
    Prediction,
    bytes_at,
    dry_run_sizes,
    predict,
    seconds_at,
)
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace
from commhooks.hook.options import from_json

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
    assert from_json(DryRuns, json.loads(json.dumps(asdict(runs)))) == runs


def test_a_field_that_an_older_file_lacks_has_its_default():
    trace = step_trace(2, "all_gather").buckets[0]
    data = asdict(trace)
    del data["exchanges"]
    assert from_json(BucketTrace, data) == trace
    with pytest.raises(KeyError, match="seconds_of_old"):
        from_json(BucketTrace, data | {"seconds_of_old": 1.0})


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


@pytest.mark.parametrize(
    "formula",
    [
        lambda n: 1e6,
        lambda n: 1e6 / n,
        lambda n: 8.0 * n,
        lambda n: 1e6 / n + 4.0,
        lambda n: 1e6 + 4.0 * n,
        lambda n: 100 + 3.0 * n + 1e3 / n,
    ],
)
def test_formulas_of_hooks_are_recovered(formula):
    known = [formula(n) for n in SIZES]
    assert bytes_at(8, SIZES, known) == pytest.approx(formula(8), rel=0.01)


def test_rounding_is_not_extrapolated_as_growth():
    # A part of 2.1 million numbers with a scale of 4 bytes for each 256 of them.
    known = [-(-2_100_000 // n) + 4 * -(-2_100_000 // n // 256) for n in SIZES]
    assert bytes_at(100_000, SIZES, known) < 30


def test_zero_bytes_stay_zero():
    assert bytes_at(1000, SIZES, [0, 0, 0]) == 0


def test_times_follow_a_line_that_does_not_fall():
    assert seconds_at(62, SIZES, [1.0, 5.0, 4.0]) == pytest.approx(7.0)
    assert seconds_at(1000, SIZES, [2.0, 1.0, 1.0]) == 2.0


EVERYONE = Members(1, spans_nodes=True)
SLOW = Link(8e5, payload_share=1.0)  # 1 MB takes 10 s


def predicted(size: int, *exchanges: BucketTrace) -> Prediction:
    """A training in which every fourth step begins exchanges, and nothing else is sent."""
    quiet = StepTrace((BucketTrace(0, 0.1, 0.0, (0.0,), ()),), 0.1, is_native=False)
    busy = replace(quiet, buckets=(replace(quiet.buckets[0], exchanges=exchanges),))
    kinds = [(0.75, quiet), (0.25, busy)]
    runs = DryRuns(dict.fromkeys((2, 4, 8), kinds), 1)
    runs = from_json(DryRuns, json.loads(json.dumps(asdict(runs))))
    return predict(runs, Network(size, SLOW, SLOW), NCCL())


def all_reduce(steps: int) -> BucketTrace:
    sent = (Collective("all_reduce", 1e6, EVERYONE),)
    return BucketTrace(0, 0.0, 0.0, (0.0, 0.0), sent, steps=steps)


def test_what_an_exchange_takes_longer_than_its_delay_is_waited_for() -> None:
    assert predicted(2).step_seconds == pytest.approx(0.2)
    found = predicted(2, all_reduce(steps=3))
    waited = (10 - 3 * 0.2) / 4
    assert found.exposed_seconds == pytest.approx(waited, rel=1e-3)
    assert found.step_seconds == pytest.approx(0.2 + waited, rel=1e-3)
    assert found.wire_bytes == 1e6 / 4


def test_an_exchange_that_is_over_in_time_costs_nothing() -> None:
    assert predicted(2, all_reduce(steps=51)).exposed_seconds == 0.0


def test_exchanges_are_extrapolated_to_more_ranks() -> None:
    found = predicted(16, all_reduce(steps=3))
    assert found.wire_bytes == pytest.approx(2 * 15 / 16 * 1e6 / 4)
    assert found.exposed_seconds > (10 - 3 * 0.2) / 4
