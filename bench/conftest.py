"""One set of rank processes for all benchmarks of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commhooks.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks over loopback."""
    with Ranks(2) as ranks:
        yield ranks
