"""Sets of rank processes that last for the whole session, one for each number of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from commhooks.cluster import Ranks

RanksOf = Callable[[int], Ranks]


def median_of(values: Sequence[float], warm_up: int) -> float:
    """Without the first ones; with ``--benchmark-disable``, which runs each case once, of all."""
    return statistics.median(values[warm_up:] or values)


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[RanksOf]:
    """The ranks over loopback, by how many they are; started when first asked for."""
    running: dict[int, Ranks] = {}
    with ExitStack() as stack:

        def ranks(world_size: int) -> Ranks:
            if world_size not in running:
                running[world_size] = stack.enter_context(Ranks(world_size))
            return running[world_size]

        yield ranks


@pytest.fixture(scope="session")
def two_ranks(ranks_of: RanksOf) -> Ranks:
    """Two ranks over loopback."""
    return ranks_of(2)
