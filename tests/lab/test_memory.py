"""The peak of memory, against arrays of a known size."""

import numpy as np
import pytest

from commhooks.lab.machine import MemoryPeak

MEGABYTE = 10**6


def peak_of(megabytes: int, kept: list[np.ndarray]) -> float:
    peak = MemoryPeak()
    kept.append(np.ones(megabytes * MEGABYTE, np.uint8))
    np.ones(megabytes * MEGABYTE, np.uint8)  # freed at once
    found = peak.nbytes()
    if found is None:
        pytest.skip("this system does not tell its peak")
    return found / MEGABYTE


def test_the_peak_contains_kept_and_freed_memory() -> None:
    kept: list[np.ndarray] = []
    assert peak_of(60, kept) == pytest.approx(120, abs=20)


def test_begin_forgets_an_earlier_peak() -> None:
    peak = MemoryPeak()
    np.ones(100 * MEGABYTE, np.uint8)
    peak.begin()
    found = peak.nbytes()
    if found is None:
        pytest.skip("this system does not tell its peak")
    assert found < 50 * MEGABYTE
