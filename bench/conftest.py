"""Sets of rank processes that last for the whole session, one per number of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from commhooks.cluster import Ranks

RanksOf = Callable[[int], Ranks]


def median_of(values: Sequence[float], warm_up: int) -> float:
    """Return the median without warm-up rounds, or of all rounds with ``--benchmark-disable``."""
    return statistics.median(values[warm_up:] or values)


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[RanksOf]:
    """Return the ranks over loopback, by their number; each set starts when it is first used."""
    running: dict[int, Ranks] = {}
    with ExitStack() as stack:

        def ranks(world_size: int) -> Ranks:
            if world_size not in running:
                running[world_size] = stack.enter_context(Ranks(world_size))
            return running[world_size]

        yield ranks


@pytest.fixture(scope="session")
def two_ranks(ranks_of: RanksOf) -> Ranks:
    """Return two ranks over loopback."""
    return ranks_of(2)
