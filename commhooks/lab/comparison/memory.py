"""Resident memory of this process; Linux only."""

import contextlib
import ctypes
from pathlib import Path

__all__ = ["Peak"]


class Peak:
    """The most memory that is used between two moments, beyond what is used when this is made."""

    def __init__(self) -> None:
        self._before: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # where the system does not allow it
            self.begin()
            self._before = _status("VmRSS")

    def begin(self) -> None:
        """Forgets the peak so far."""
        ctypes.CDLL(None).malloc_trim(0)  # free memory that is kept would hide what is taken
        Path("/proc/self/clear_refs").write_text("5")

    def nbytes(self) -> int | None:
        """Since :meth:`begin`; None where it cannot be told."""
        return None if self._before is None else _status("VmHWM") - self._before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
