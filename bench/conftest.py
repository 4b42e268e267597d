"""One set of rank processes for all benchmarks of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.cluster import Cluster, cluster


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Cluster]:
    """Two ranks over loopback."""
    with cluster(2) as ranks:
        yield ranks
