"""A plugin of pytest that keeps files with the tests that were to run, and with those that ended.

A stage that is killed can so say what it has not done. With pytest-xdist all workers write, the
same tests to the first file, and to the second one those that they have run.
"""

import os
from pathlib import Path

import pytest

FILE = "GPU_CHECK_TESTS"
"""The environment variable with the path of the first file; the second one ends with ".done"."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the tests, unless this is the parent of workers, which has none."""
    if session.items and FILE in os.environ:
        Path(os.environ[FILE]).write_text("\n".join(item.nodeid for item in session.items))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Add a test."""
    if FILE in os.environ:
        with Path(os.environ[FILE] + ".done").open("a") as done:
            done.write(f"{nodeid}\n")


def left_in(path: Path) -> list[str]:
    """Return the names of the tests that have not ended; none if no tests were collected."""
    if not path.exists():
        return []
    done = path.with_name(path.name + ".done")
    ended = set(done.read_text().splitlines() if done.exists() else ())
    return [name.rpartition("::")[2] for name in path.read_text().splitlines() if name not in ended]
