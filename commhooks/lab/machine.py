"""This machine: its cores, its memory, and a description."""

import contextlib
import ctypes
import gc
import os
import platform
from pathlib import Path

import torch

from commhooks.cluster import CPU, Device


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine(device: Device = CPU) -> dict[str, str | int]:
    """Return the properties of the machine that measurements on a device depend on."""
    on_cuda = {"cuda": str(torch.version.cuda)} if device != CPU else {}
    model = _fields("/proc/cpuinfo").get("model name", platform.processor())
    return {
        "device": str(device),
        "cpu": model,
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **on_cuda,
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


class DeviceMemoryPeak(MemoryPeak):
    """The same of the memory that torch has allocated on this rank's CUDA device."""

    def __init__(self) -> None:
        self.begin()
        self._start = torch.cuda.memory_allocated()

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def nbytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._start


def memory_peak(device: Device) -> MemoryPeak:
    """Return the peak of this rank's memory on a device, from now on."""
    return MemoryPeak() if device.type == "cpu" else DeviceMemoryPeak()


def free_memory() -> None:
    """Free what only cycles keep, and give free memory back to the system and the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
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
