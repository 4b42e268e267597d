"""The memory of hooks besides the model and its gradients, each in new processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from bench.measured_hooks import MEASURED_HOOKS, TORCHS_HOOKS, MeasuredHook, entry_of
from bench.memory import Usage, expected_state_bytes, usage
from commhooks.cluster import Ranks

MODEL = "bench.models:FourLayers"
NOISE = 0.05  # share of the gradients: other allocations of the process
RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def _freed_memory_goes_back() -> Iterator[None]:
    """Make the C library return memory, so that peaks do not depend on fragmentation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "MALLOC_MMAP_THRESHOLD_", "65536")
        yield


@functools.cache
def usage_of(name: str) -> Usage:
    """Return the figures of the rank that needed most."""
    with Ranks(RANKS) as ranks:
        return max(ranks(usage, MODEL, entry_of(name)), key=lambda used: used.peak)


@pytest.mark.benchmark(group="memory")
@pytest.mark.parametrize(
    "measured",
    [MeasuredHook("torch", 0.0), *TORCHS_HOOKS, *MEASURED_HOOKS],
    ids=lambda measured: measured.name,
)
def test_memory(benchmark: Any, measured: MeasuredHook) -> None:
    """Measure memory; the time that is shown is that of starting the processes."""
    bare = usage_of("bare")
    used = benchmark.pedantic(usage_of, (measured.name,), rounds=1, iterations=1)
    said = expected_state_bytes(measured.hook, MODEL, RANKS) if measured.hook else None
    if said is not None:
        assert used.state_bytes == pytest.approx(said, rel=1e-3)
    if measured.hook == "allreduce":
        torch_peak = usage_of("torch").peak
        assert used.peak <= torch_peak + NOISE * used.gradient_bytes
    benchmark.extra_info.update(
        gradient_bytes=used.gradient_bytes,
        state_bytes=used.state_bytes,
        state_bytes_as_documented=said,
        between_steps_bytes=used.between_steps - bare.between_steps,
        peak_bytes=used.peak - bare.peak,
        peak_to_gradients=(used.peak - bare.peak) / used.gradient_bytes,
    )
