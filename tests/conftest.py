"""Fixtures for tests on several ranks; every warning is an error, on the ranks as well."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from commhooks.testing import close_ranks
from commhooks.testing import run_ranks as run


@pytest.fixture(scope="session")
def _ranks_closed() -> Iterator[None]:
    yield
    close_ranks()


@pytest.fixture
def run_ranks(_ranks_closed: None) -> Any:
    """:func:`commhooks.testing.run_ranks`, whose processes end with the session."""
    return run


@pytest.fixture
def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
