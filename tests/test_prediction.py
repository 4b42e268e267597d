"""The formulas by which links are predicted."""

import math

import pytest

from commhooks.comparison.prediction import break_even_rate, predict_step


def predicted(**changes: float) -> float:
    given: dict[str, float] = {
        "forward_seconds": 0.1,
        "step_seconds": 0.4,
        "wire_bytes": 1e8,
        "buckets": 4,
        "bits_per_second": 1e9,
        "latency_seconds": 0.0,
    }
    return predict_step(**(given | changes))  # type: ignore[arg-type]


def test_a_slow_link_sets_the_pace() -> None:
    # 0.8 s on the wire, after the first quarter of 0.3 s of computing.
    assert predicted() == pytest.approx(0.1 + 0.3 / 4 + 0.8)


def test_behind_a_fast_link_one_bucket_is_left_over() -> None:
    assert predicted(bits_per_second=1e10) == pytest.approx(0.1 + 0.3 + 0.08 / 4)


def test_one_bucket_cannot_overlap() -> None:
    assert predicted(buckets=1) == pytest.approx(0.4 + 0.8)


def test_latency_counts_per_bucket() -> None:
    assert predicted(latency_seconds=0.01) - predicted() == pytest.approx(0.04)


def test_nothing_to_send() -> None:
    assert predicted(wire_bytes=0.0, latency_seconds=1.0) == pytest.approx(0.4)


def test_at_the_break_even_rate_both_are_equal() -> None:
    rate = break_even_rate(step_seconds=0.5, wire_bytes=2e7, plain_seconds=0.4, plain_bytes=1e8)
    assert 0.5 + 8 * 2e7 / rate == pytest.approx(0.4 + 8 * 1e8 / rate)


def test_break_even_at_the_ends() -> None:
    same = {"plain_seconds": 0.4, "plain_bytes": 1e8}
    assert break_even_rate(step_seconds=0.3, wire_bytes=1e7, **same) == math.inf
    assert break_even_rate(step_seconds=0.5, wire_bytes=1e8, **same) == 0
    assert break_even_rate(step_seconds=0.5, wire_bytes=2e8, **same) == 0
    assert break_even_rate(step_seconds=0.3, wire_bytes=2e8, **same) == 0
