"""Whether processes still run, and waiting for it."""

import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """A process that has ended stays a zombie where nobody collects orphans, as in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
