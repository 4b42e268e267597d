"""Hooks over loopback and over a shaped link, against plain averaging and the link's limit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from bench import steps
from commhooks.links import Link, shaped_link, unavailable
from commhooks.ranks import Ranks

ROUNDS = 7
WARM_UP = 2
MODEL = "transformer-151MB"
GIGABIT = 1e9


@pytest.fixture(scope="module")
def gigabit() -> Iterator[tuple[Ranks, Link]]:
    """Two hosts that are joined by a link of 1 Gbit/s."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with shaped_link(2, GIGABIT) as link, Ranks(2, link) as ranks:
        yield ranks, link


def measure(benchmark: Any, ranks: Ranks, wrapper: str, rounds: int = ROUNDS) -> float:
    """Median seconds of a backward on the slowest rank."""
    seconds: list[float] = []

    def run() -> None:
        seconds.append(max(ranks(steps.backward, wrapper, True)))

    benchmark.pedantic(run, rounds=rounds, warmup_rounds=WARM_UP, iterations=1)
    return statistics.median(seconds[WARM_UP:])


def median_of(ranks: Ranks, wrapper: str, rounds: int = ROUNDS) -> float:
    """The same without pytest-benchmark, for what a row is compared with."""
    seconds = [max(ranks(steps.backward, wrapper, True)) for _ in range(rounds + WARM_UP)]
    return statistics.median(seconds[WARM_UP:])


@pytest.mark.benchmark(group="hooks: 1 Gbit/s")
@pytest.mark.parametrize(
    ("wrapper", "largest_error"),
    [
        ("torch", 1e-6),
        ("ours", 1e-6),
        ("torch fp16", 1e-2),
        ("ours fp16", 1e-2),
        ("ours bf16", 1e-2),
        ("ours powersgd", 1.0),
    ],
)
def test_over_a_gigabit_link(
    benchmark: Any, gigabit: tuple[Ranks, Link], wrapper: str, largest_error: float
) -> None:
    """Share of the floor: wire bytes over bandwidth, plus the plain backward."""
    ranks, link = gigabit
    gradient_bytes = ranks(steps.prepare, MODEL, ["bare", wrapper], {})[0]
    ranks(steps.backward, "bare", True)
    ranks(steps.backward, wrapper, True)
    error = max(ranks(steps.error_against_mean, wrapper))
    assert error <= largest_error
    bare = median_of(ranks, "bare")
    seconds = measure(benchmark, ranks, wrapper)
    wire_bytes = ranks(steps.wire_bytes, wrapper)[0]
    floor = wire_bytes / link.bytes_per_second + bare
    benchmark.extra_info.update(
        gradient_bytes=gradient_bytes,
        wire_bytes=wire_bytes,
        ratio=gradient_bytes / wire_bytes,
        error=error,
        seconds=seconds,
        bare_seconds=bare,
        floor_seconds=floor,
        times_floor=seconds / floor,
        aim="fp16, bf16: at most 1.10 times the floor",
    )


@pytest.mark.benchmark(group="hooks: loopback")
@pytest.mark.parametrize("wrapper", ["ours", "ours fp16", "ours bf16", "ours powersgd"])
def test_over_loopback(benchmark: Any, two_ranks: Ranks, wrapper: str) -> None:
    """What hooks cost where the wire is as fast as memory."""
    gradient_bytes = two_ranks(steps.prepare, MODEL, ["bare", wrapper], {})[0]
    two_ranks(steps.backward, "bare", True)
    two_ranks(steps.backward, wrapper, True)
    error = max(two_ranks(steps.error_against_mean, wrapper))
    seconds = measure(benchmark, two_ranks, wrapper)
    wire_bytes = two_ranks(steps.wire_bytes, wrapper)[0]
    benchmark.extra_info.update(
        gradient_bytes=gradient_bytes,
        wire_bytes=wire_bytes,
        ratio=gradient_bytes / wire_bytes,
        error=error,
        seconds=seconds,
    )


@pytest.mark.benchmark(group="hooks: awaiting")
def test_awaited_stage(benchmark: Any, two_ranks: Ranks) -> None:
    """What Python adds to each awaited collective; the aim is at most 50 microseconds."""
    two_ranks(steps.prepare_stages)
    seconds: dict[str, list[float]] = {"bare": [], "bare, one group": [], "awaited": []}

    def run() -> None:
        seconds["bare"].append(max(two_ranks(steps.bare_stages, steps.STAGES)))
        seconds["bare, one group"].append(max(two_ranks(steps.bare_stages, 1)))
        seconds["awaited"].append(max(two_ranks(steps.awaited_stages)))

    benchmark.pedantic(run, rounds=30, warmup_rounds=5, iterations=1)
    per_stage = {
        name: statistics.median(values[5:]) / steps.STAGES for name, values in seconds.items()
    }
    benchmark.extra_info.update(
        stages=steps.STAGES,
        seconds=per_stage,
        added_seconds=per_stage["awaited"] - per_stage["bare"],
        aim=50e-6,
    )
