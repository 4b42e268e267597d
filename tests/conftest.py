"""Fixtures for tests on several ranks; every warning is an error, on the ranks as well."""

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
