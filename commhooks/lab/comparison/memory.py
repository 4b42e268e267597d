"""The resident memory of this process; Linux only."""

import contextlib
import ctypes
import gc
from pathlib import Path

__all__ = ["Peak", "give_back"]


class Peak:
    """The peak of memory use above the level at which this object was made."""

    def __init__(self) -> None:
        self._before: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # the system may not allow it
            self.begin()
            self._before = _status("VmRSS")

    def begin(self) -> None:
        """Forget the peak so far."""
        _trim()  # allocations from kept free memory would not show
        Path("/proc/self/clear_refs").write_text("5")

    def nbytes(self) -> int | None:
        """Return the peak since :meth:`begin`, or None if the system does not tell."""
        return None if self._before is None else _status("VmHWM") - self._before


def give_back() -> None:
    """Free what only cycles keep, and give free memory back to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # other systems have no malloc_trim()
        _trim()


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
