import pytest

from commhooks.costs.growth import bytes_at, seconds_at

SIZES = [2, 4, 32]


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
