"""Resident memory of this process, in bytes; Linux only."""

import ctypes
from pathlib import Path

__all__ = ["peak_bytes", "reset_peak", "resident_bytes"]


def reset_peak() -> None:
    """Gives free memory back and starts to look for the peak anew.

    Raises OSError where the system does not allow that.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    """What is in use now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that was in use since :func:`reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
