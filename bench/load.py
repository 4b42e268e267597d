"""CPU time of other processes during a measurement."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def busy_seconds() -> float:
    """Return the CPU seconds of all cores since the machine was started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def own_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds that these processes have used."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
