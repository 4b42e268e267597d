"""Rank processes that last for the whole session."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import pytest

from commhooks.cluster import Ranks


def median_of(values: Sequence[float], warm_up: int) -> float:
    """Return the median without warm-up rounds, or of all rounds with ``--benchmark-disable``."""
    return statistics.median(values[warm_up:] or values)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Return two ranks over loopback."""
    with Ranks(2) as ranks:
        yield ranks
