"""This machine: its cores, its memory, and a description."""

import contextlib
import ctypes
import gc
import os
import platform
from pathlib import Path

import torch


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine() -> dict[str, str | int]:
    """Return the properties of the machine that measurements depend on."""
    model = _fields("/proc/cpuinfo").get("model name", platform.processor())
    return {
        "cpu": model,
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def available_bytes() -> int | None:
    """Return the memory that new processes can have, or None if the system does not tell."""
    return _bytes("/proc/meminfo", "MemAvailable")


class MemoryPeak:
    """The peak of this process's memory use above the level at which this object was made."""

    def __init__(self) -> None:
        self._before: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # the system may not allow it
            self._forget()
            self._before = _bytes("/proc/self/status", "VmRSS")

    def begin(self) -> None:
        """Forget the peak so far."""
        if self._before is not None:
            self._forget()

    def _forget(self) -> None:
        _trim()  # allocations from kept free memory would not show
        Path("/proc/self/clear_refs").write_text("5")

    def nbytes(self) -> int | None:
        """Return the peak since :meth:`begin`, or None if the system does not tell."""
        peak = _bytes("/proc/self/status", "VmHWM")
        return None if self._before is None or peak is None else peak - self._before


def free_memory() -> None:
    """Free what only cycles keep, and give free memory back to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # other systems have no malloc_trim()
        _trim()


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _bytes(path: str, name: str) -> int | None:
    text = _fields(path).get(name)
    return None if text is None else int(text.split()[0]) * 1024  # "123 kB"


def _fields(path: str) -> dict[str, str]:
    """Return the lines ``name: value`` of a file; none if it does not exist."""
    if not Path(path).exists():
        return {}
    pairs = (line.partition(":") for line in Path(path).read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
