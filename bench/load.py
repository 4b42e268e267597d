"""CPU time of other processes during a measurement."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["busy_seconds", "own_seconds"]


def busy_seconds() -> float:
    """Return the CPU seconds of all cores since the machine was started."""
    ticks = list(map(int, _first_line("/proc/stat").split()[1:]))
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def own_seconds(pids: list[int]) -> float:
    """Return the CPU seconds that these processes have used."""
    ticks = 0
    for pid in pids:
        fields = _first_line(f"/proc/{pid}/stat").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _first_line(path: str) -> str:
    return Path(path).read_text().partition("\n")[0]
