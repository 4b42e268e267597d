import pytest

from commhooks import CommHookError
from commhooks.costs.growth import bytes_at, seconds_at
from commhooks.costs.step_trace import BucketScript, Collective, Members, StepScript
from commhooks.lab.simulation.dry_runs import Rehearsals, rehearsed_sizes

SIZES = [2, 4, 32]
ALL = Members(1, spans_nodes=True)


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
def test_formulas_of_hooks_are_found_again(formula):
    known = [formula(n) for n in SIZES]
    assert bytes_at(8, SIZES, known) == pytest.approx(formula(8), rel=0.01)


def test_rounding_is_not_taken_for_growth():
    # A part of 2.1 million numbers with a scale of 4 bytes for each 256 of them.
    known = [-(-2_100_000 // n) + 4 * -(-2_100_000 // n // 256) for n in SIZES]
    assert bytes_at(100_000, SIZES, known) < 30


def test_nothing_stays_nothing():
    assert bytes_at(1000, SIZES, [0, 0, 0]) == 0


def test_times_go_on_along_a_line_that_does_not_fall():
    assert seconds_at(62, SIZES, [1.0, 5.0, 4.0]) == pytest.approx(7.0)
    assert seconds_at(1000, SIZES, [2.0, 1.0, 1.0]) == 2.0


def script(size: int, *operations: str) -> StepScript:
    collectives = tuple(Collective(name, 1000.0, ALL) for name in operations)
    local = (0.001 * size,) * (len(operations) + 1)
    return StepScript((BucketScript(1000, 1.0, 0.0, local, collectives),), 0.5, is_native=False)


def test_sizes_that_were_rehearsed_are_not_extrapolated():
    rehearsals = Rehearsals({n: [(1.0, script(n, "all_reduce"))] for n in SIZES}, 1)
    assert rehearsals.at(4) == [(1.0, script(4, "all_reduce"))]
    ((share, larger),) = rehearsals.at(1000)
    assert share == 1.0
    assert larger.buckets[0].local_seconds == pytest.approx((1.0, 1.0))
    assert larger.buckets[0].collectives == script(1000, "all_reduce").buckets[0].collectives


def test_a_hook_that_does_other_things_in_larger_worlds_is_not_extrapolated():
    by_size = {n: [(1.0, script(n, *["all_reduce"] * (n // 2)))] for n in SIZES}
    with pytest.raises(CommHookError, match="among 1000 ranks"):
        Rehearsals(by_size, 1).at(1000)


def test_scripts_survive_json():
    rehearsals = Rehearsals({n: [(1.0, script(n, "all_gather"))] for n in SIZES}, 1)
    assert Rehearsals.from_json(rehearsals.to_json()) == rehearsals


@pytest.mark.parametrize(
    ("size", "ranks_per_node", "expected"),
    [
        (4096, 1, [2, 4, 32]),
        (3, 1, [2, 3, 4, 32]),
        (4096, 8, [16, 32, 64]),
        (8, 8, [8, 16, 32, 64]),
    ],
)
def test_what_is_rehearsed(size, ranks_per_node, expected):
    assert rehearsed_sizes([size], ranks_per_node) == expected
