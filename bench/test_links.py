"""Hooks over links of several rates among several ranks, beside what the simulation predicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench import steps
from bench.predictions import BUCKET_MB, HOOKS, MODEL, PLAIN, RANKS, RATES, WARM_UP, Cell
from bench.predictions import rates_of_this_machine as measure_rates
from bench.test_hooks import median_of
from commhooks.links import Link, shaped_link, unavailable
from commhooks.ranks import Ranks
from commhooks.rates import format_rate
from commhooks.simulation import Measurements

ROUNDS = 3


@pytest.fixture(scope="module")
def rates() -> Measurements:
    """What predictions are made of."""
    return measure_rates()


@pytest.fixture(
    scope="module",
    params=[(size, rate) for size in RANKS for rate in RATES],
    ids=lambda cell: f"{cell[0]} ranks, {format_rate(cell[1])}",
)
def cluster(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, Link]]:
    """Ranks on a link, with a wrapped model for each hook."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    size, rate = request.param
    with shaped_link(size, rate) as link, Ranks(size, link) as ranks:
        ranks(steps.prepare, MODEL, ["bare", *HOOKS], {"bucket_cap_mb": BUCKET_MB})
        yield ranks, link


@pytest.mark.benchmark(group="links")
@pytest.mark.parametrize("hook", HOOKS)
def test_over_a_link(
    benchmark: Any, cluster: tuple[Ranks, Link], rates: Measurements, hook: str
) -> None:
    """Share of the floor, and the rate below which the hook beats the plain average."""
    ranks, link = cluster
    ranks(steps.backward, "bare", True)
    ranks(steps.backward, hook, True)
    error = max(ranks(steps.error_against_mean, hook))
    assert error <= (1e-6 if hook == PLAIN else 1.0)
    bare = median_of(ranks, "bare", ROUNDS)
    seconds: list[float] = []

    def run() -> None:
        seconds.append(max(ranks(steps.backward, hook, True)))

    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=WARM_UP, iterations=1)
    measured = sorted(seconds[WARM_UP:])[ROUNDS // 2]
    wire_bytes = ranks(steps.wire_bytes, hook)[0]
    floor = wire_bytes / link.bytes_per_second + bare
    cell = Cell(ranks.world_size, link.bits_per_second, hook)
    predicted = cell.predict(rates).backward_seconds
    benchmark.extra_info.update(
        wire_bytes=wire_bytes,
        error=error,
        seconds=measured,
        bare_seconds=bare,
        floor_seconds=floor,
        times_floor=measured / floor,
        predicted_seconds=predicted,
        prediction_error=predicted / measured - 1,
        pays_below_mbit=cell.pays_below(rates) / 1e6,
        aim="predictions within 15 % in the median, 30 % at worst",
    )
