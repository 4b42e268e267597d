"""Hooks over links of several rates on several ranks, beside predictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.measured_hooks import SPARSE, MeasuredHook
from bench.measurement import Place, measure
from bench.predictions import BUCKET_MB, HOOKS, MODEL, Cell, rates_of_this_machine
from commhooks.cluster import Ranks
from commhooks.cluster.links import shaped_link, unavailable
from commhooks.lab.simulation import Measurements
from commhooks.lab.units import format_rate

# Ranks, and bits per second. `python -m bench.predictions` measures all combinations.
PLACES = [(2, 100e6), (2, 1e9), (4, 1e9), (2, 10e9)]
# Ranks start with equal parameters, so nothing is sent before.
OPTIONS = {"bucket_cap_mb": BUCKET_MB, "init_sync": False}


@pytest.fixture(scope="module")
def rates() -> Measurements:
    """Return the measurements that predictions use."""
    return rates_of_this_machine()


@pytest.fixture(
    scope="module",
    params=PLACES,
    ids=lambda place: f"{place[0]} ranks, {format_rate(place[1])}",
)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return ranks on a link."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    size, rate = request.param
    with shaped_link(size, rate) as link, Ranks(size, link) as ranks:
        yield Place(ranks, link.bytes_per_second, MODEL, OPTIONS, rounds=2)


@pytest.mark.benchmark(group="links")
@pytest.mark.parametrize("hook", HOOKS)
def test_over_a_link(benchmark: Any, place: Place, rates: Measurements, hook: str) -> None:
    """Measure against the floor, and predict the rate below which the hook is faster."""
    measure(benchmark, place, MeasuredHook(hook, SPARSE), beside=["bare"])
    cell = Cell(place.ranks.world_size, place.limit * 8, hook)
    predicted = cell.predict(rates).backward_seconds
    benchmark.extra_info.update(
        predicted_seconds=predicted,
        prediction_error=predicted / benchmark.extra_info["seconds"] - 1,
        break_even_mbit=cell.break_even_rate(rates) / 1e6,
        aim="predictions within 15 % in the median, 30 % at worst",
    )
