"""Hooks beside torch's: over loopback, over a shaped link, and the cost of awaiting."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from bench import steps
from bench.conftest import RanksOf, median_of
from bench.measured_hooks import MEASURED_HOOKS, TORCH, TORCH_POWERSGD, MeasuredHook
from bench.measurement import Place, measure
from commhooks.cluster import Ranks
from commhooks.cluster.links import ShapedLink, shaped_link, unavailable

LARGE = "transformer-151MB"
SMALL = "transformer-25MB"
GIGABIT = 1e9
LIMIT_BYTES = 25 << 20  # of the all-reduce that measures the loopback

# Compared with floors and aims over a link, on the large model.
OVER_A_LINK = ("allreduce", "fp16", "bf16", "int8", "int4", "onebit", "topk", "powersgd")


def name_of(value: object) -> str | None:
    return value.wrapper if isinstance(value, MeasuredHook) else None


@functools.cache
def loopback_limit(ranks: Ranks) -> float:
    """Return the bytes per second that each rank can send at most."""
    return min(ranks(steps.all_reduce_bandwidth, LIMIT_BYTES))


@pytest.mark.benchmark(group="hooks: 151 MB over loopback")
@pytest.mark.parametrize(
    "measured", [*TORCH, *(s for s in MEASURED_HOOKS if s.hook in OVER_A_LINK)], ids=name_of
)
def test_large_model(benchmark: Any, ranks_of: RanksOf, measured: MeasuredHook) -> None:
    """Measure hooks over loopback, which is as fast as memory."""
    ranks = ranks_of(2)
    measure(benchmark, Place(ranks, loopback_limit(ranks), LARGE), measured)


@pytest.mark.benchmark(group="hooks: bucket and world sizes, 25 MB over loopback")
@pytest.mark.parametrize("measured", [*TORCH, *MEASURED_HOOKS], ids=name_of)
@pytest.mark.parametrize(("world_size", "bucket_mb"), [(2, 1), (2, 25), (4, 25)], ids=str)
def test_every_hook(
    benchmark: Any, ranks_of: RanksOf, measured: MeasuredHook, world_size: int, bucket_mb: int
) -> None:
    ranks = ranks_of(world_size)
    options = {"bucket_cap_mb": bucket_mb}
    measure(benchmark, Place(ranks, loopback_limit(ranks), SMALL, options, rounds=3), measured)


@pytest.mark.benchmark(group="hooks: PowerSGD in one bucket, 25 MB over loopback")
@pytest.mark.parametrize(
    "measured",
    [TORCH_POWERSGD, *(s for s in MEASURED_HOOKS if s.hook == "powersgd")],
    ids=name_of,
)
def test_powersgd(benchmark: Any, ranks_of: RanksOf, measured: MeasuredHook) -> None:
    """Measure PowerSGD in one bucket: torch's hangs or aborts on several over Gloo."""
    ranks = ranks_of(2)
    options = {"bucket_cap_mb": 1000}
    measure(benchmark, Place(ranks, loopback_limit(ranks), SMALL, options), measured)


@pytest.fixture(scope="session")
def gigabit() -> Iterator[tuple[Ranks, ShapedLink]]:
    """Return two hosts with a link of 1 Gbit/s between them."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with shaped_link(2, GIGABIT) as link, Ranks(2, link) as ranks:
        yield ranks, link


@pytest.mark.benchmark(group="hooks: 151 MB over 1 Gbit/s")
@pytest.mark.parametrize(
    "measured", [*TORCH, *(s for s in MEASURED_HOOKS if s.hook in OVER_A_LINK)], ids=name_of
)
def test_over_a_gigabit_link(
    benchmark: Any, gigabit: tuple[Ranks, ShapedLink], measured: MeasuredHook
) -> None:
    """Measure hooks against the aims in results/README.md."""
    ranks, link = gigabit
    place = Place(ranks, link.bytes_per_second, LARGE, {"init_sync": False}, rounds=3)
    measure(benchmark, place, measured)


@pytest.mark.benchmark(group="hooks: awaiting")
def test_awaited_stage(benchmark: Any, ranks_of: RanksOf) -> None:
    """Measure what Python adds to each awaited collective; the aim is at most 50 microseconds."""
    ranks = ranks_of(2)
    ranks(steps.prepare_stages)
    seconds: dict[str, list[float]] = {"bare": [], "bare, one group": [], "awaited": []}

    def run() -> None:
        seconds["bare"].append(max(ranks(steps.bare_stages, steps.STAGES)))
        seconds["bare, one group"].append(max(ranks(steps.bare_stages, 1)))
        seconds["awaited"].append(max(ranks(steps.awaited_stages)))

    benchmark.pedantic(run, rounds=30, warmup_rounds=5, iterations=1)
    per_stage = {
        name: median_of(values, warm_up=5) / steps.STAGES for name, values in seconds.items()
    }
    benchmark.extra_info.update(
        stages=steps.STAGES,
        seconds=per_stage,
        added_seconds=per_stage["awaited"] - per_stage["bare"],
        aim=50e-6,
    )
