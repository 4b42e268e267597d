"""Tests with the packages of the extra `integrations`. All are exhaustive.

Importing the packages takes seconds, so files that will not run are not even collected.
"""

from pathlib import Path

import pytest
from support.integrations import MISSING

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if MISSING or config.option.markexpr == "not exhaustive" else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.exhaustive)
