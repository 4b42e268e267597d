"""Predictions from dry runs of a few sizes, extrapolated to others."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NoReturn

import pytest

from commhooks import CommHookError
from commhooks.costs.backends import NCCL
from commhooks.costs.network import Link, Network
from commhooks.costs.prediction import (
    DryRuns,
    Prediction,
    bytes_at,
    complete,
    dry_run_sizes,
    predict,
    seconds_at,
)
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace
from commhooks.hook.options import from_json

SIZES = [2, 4, 32]
ALL = Members(1, spans_nodes=True)


def step_trace(size: int, operations: Sequence[str], nbytes: float = 1e6) -> StepTrace:
    collectives = tuple(Collective(name, nbytes, ALL) for name in operations)
    local = (0.001 * size,) * (len(operations) + 1)
    return StepTrace((BucketTrace(20_000_000, 1.0, 0.0, local, collectives),), 0.5, is_native=False)


def runs_of(trace: Callable[[int], StepTrace], sizes: Sequence[int] = SIZES) -> DryRuns:
    return DryRuns({n: [(1.0, trace(n))] for n in sizes}, 1)


def test_only_other_sizes_are_extrapolated():
    runs = runs_of(partial(step_trace, operations=("all_reduce",)))
    off_the_line = step_trace(100, ("all_reduce",))
    assert DryRuns({**runs.by_size, 4: [(1.0, off_the_line)]}, 1).at(4) == [(1.0, off_the_line)]
    ((share, larger),) = runs.extrapolate(1000)
    assert share == 1.0
    assert larger.buckets[0].local_seconds == pytest.approx((1.0, 1.0))
    assert larger.buckets[0].collectives == step_trace(1000, ("all_reduce",)).buckets[0].collectives


def test_a_single_node_is_not_extrapolated_to_several():
    by_size = {n: [(1.0, step_trace(n, ("all_reduce",)))] for n in (4, 8, 64)}
    inside = {2: [(1.0, step_trace(2, ()))]}  # no collectives between nodes
    assert DryRuns(inside | by_size, 2).extrapolate(1000) == DryRuns(by_size, 2).extrapolate(1000)


def sparse_trace(size: int) -> StepTrace:
    """A hook that gathers 1 MB of each rank, and sums 20 MB where that sends less."""
    sums = size * 1e6 > 2 * 20e6
    return step_trace(size, ("all_reduce" if sums else "all_gather",), 20e6 if sums else 1e6)


def sparse_bytes(size: int) -> float:
    return sparse_trace(size).wire_bytes(size)


def refuse(size: int) -> NoReturn:
    raise CommHookError(f"run dry among {size} ranks")


def test_a_hook_that_sends_the_bytes_of_its_formula_is_not_run_dry_in_large_worlds():
    runs = runs_of(partial(step_trace, operations=("all_gather",)))
    found = complete(runs, [1000, 70_000], lambda size: (size - 1) * 1e6, refuse)
    assert found.by_size == runs.by_size
    assert found.at(1000) == runs.extrapolate(1000)
    assert all(map(found.has, (1000, 4096, 5000, 100_000)))
    assert not found.has(16)
    assert not found.has(1 << 20)
    with pytest.raises(CommHookError, match="among 1048576 ranks: this size has not been measured"):
        found.at(1 << 20)


def test_a_hook_with_other_collectives_in_larger_worlds_is_run_dry_there():
    ran = []

    def run(size: int) -> list[tuple[float, StepTrace]]:
        ran.append(size)
        return [(1.0, sparse_trace(size))]

    found = complete(runs_of(sparse_trace), [1000, 4096], sparse_bytes, run)
    assert ran == [64]  # what follows is alike
    for size in (4, 32, 64, 128, 1000, 1024, 2000, 4096, 1 << 17):
        ((_, trace),) = found.at(size)
        assert trace.wire_bytes(size) == pytest.approx(sparse_bytes(size), rel=0.01)
    assert not found.has(40)  # between two sizes with different collectives


def test_a_formula_that_disagrees_is_an_error_where_memory_does_not_suffice():
    runs = runs_of(partial(step_trace, operations=("all_gather",)))
    found = complete(runs, [64, 1000], lambda size: 1.5 * size * 1e6, refuse)
    with pytest.raises(
        CommHookError, match=r"cannot be predicted among 1000 ranks: .* 1\.5 GB, more than 80 MB"
    ):
        found.at(1000)
    no_formula = complete(runs, [1000], lambda size: None, refuse)
    with pytest.raises(CommHookError, match=r"among 1000 ranks: .*wire_bytes.* 999 MB, more"):
        no_formula.at(1000)


def test_a_hook_without_a_formula_is_run_dry_where_memory_suffices():
    runs = runs_of(partial(step_trace, operations=("all_reduce",)))
    ran = [(1.0, step_trace(64, ("all_reduce",)))]
    found = complete(runs, [64], lambda size: None, lambda size: ran)
    assert found.at(64) == ran
    assert not found.has(128)
    failed = complete(runs, [64], lambda size: None, refuse)
    assert failed.failures == {64: "run dry among 64 ranks"}


def test_only_runs_with_the_kinds_of_steps_of_the_largest_one_are_extrapolated():
    """A schedule from summing to a hook that sums in large worlds has one kind there."""
    first, second = step_trace(2, ("all_reduce",)), step_trace(2, ("all_gather",))
    by_size = {n: [(0.5, first), (0.5, second)] for n in (2, 4)} | {32: [(1.0, first)]}
    assert DryRuns(by_size, 1).extrapolate(64) == [(1.0, first)]


def test_dry_runs_survive_json():
    runs = runs_of(partial(step_trace, operations=("all_gather",)))
    runs = replace(runs, confirmed=[64], failures={128: "too large"})
    assert from_json(DryRuns, json.loads(json.dumps(asdict(runs)))) == runs


def test_a_field_that_an_older_file_lacks_has_its_default():
    trace = step_trace(2, ("all_gather",)).buckets[0]
    data = asdict(trace)
    del data["exchanges"]
    assert from_json(BucketTrace, data) == trace
    with pytest.raises(KeyError, match="seconds_of_old"):
        from_json(BucketTrace, data | {"seconds_of_old": 1.0})


@pytest.mark.parametrize(
    ("size", "ranks_per_node", "expected"),
    [
        (4096, 1, [2, 4, 32]),
        (3, 1, [3]),
        (4096, 8, [16, 32, 64]),
        (8, 8, [8]),
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


def test_a_single_size_is_extrapolated_as_it_is():
    assert seconds_at(62, [32], [4.0]) == 4.0
    assert bytes_at(62, [32], [4000.0]) == 4000


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
    runs = DryRuns(dict.fromkeys((2, 4, 8), kinds), 1, confirmed=[16])
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
