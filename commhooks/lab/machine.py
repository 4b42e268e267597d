"""A description of this machine."""

import os
import platform
from pathlib import Path

import torch

__all__ = ["cores", "describe_machine"]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine() -> dict[str, str | int]:
    """Return what a reader of measurements needs to know about the machine."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
