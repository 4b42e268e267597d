"""The reduce-scatter of FSDP2 in few bits beside torch's, over a link of 1 Gbit/s per rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench import sharded_steps
from bench.conftest import median_of
from bench.sharded_steps import TORCH
from commhooks.cluster import Ranks
from commhooks.cluster.links import shaped_link, unavailable

NUMBERS = ["int8", "fp8", "int4", "bf16"]
WARM_UP = 1
ROUNDS = 5


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Return ranks on a link, with their models."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with shaped_link(request.param, 1e9) as link, Ranks(request.param, link) as ranks:
        ranks(sharded_steps.prepare, [TORCH, *NUMBERS])
        yield ranks


@pytest.mark.benchmark(group="sharded")
@pytest.mark.parametrize("numbers", NUMBERS)
def test_reduce_scatter(benchmark: Any, ranks: Ranks, numbers: str) -> None:
    """Measure the collective alone and the whole step, in turn with torch's."""
    error = max(ranks(sharded_steps.collective_error, numbers))
    assert error < 0.2
    seconds: dict[tuple[Any, str], list[float]] = {}

    def run(function: Any, name: str) -> None:
        seconds.setdefault((function, name), []).append(max(ranks(function, name)))

    def run_others() -> None:
        run(sharded_steps.collective, TORCH)
        run(sharded_steps.step, TORCH)
        run(sharded_steps.step, numbers)

    benchmark.pedantic(
        run,
        (sharded_steps.collective, numbers),
        setup=run_others,
        rounds=ROUNDS,
        warmup_rounds=WARM_UP,
        iterations=1,
    )
    median = {key: median_of(values, WARM_UP) for key, values in seconds.items()}
    wire_bytes, plain_bytes = ranks(sharded_steps.sent, numbers)[0]
    collective, step = sharded_steps.collective, sharded_steps.step
    benchmark.extra_info.update(
        error=error,
        ratio=plain_bytes / wire_bytes,
        seconds=median[collective, numbers],
        torch_seconds=median[collective, TORCH],
        times_faster=median[collective, TORCH] / median[collective, numbers],
        step_seconds=median[step, numbers],
        torch_step_seconds=median[step, TORCH],
        aim="int8: 3.5 times fewer bytes, 2.5 times faster",
    )
