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
    """The peak of memory use above the level at which this object was made.

    On the CPU that of this process, on CUDA what torch has allocated on this rank's device.
    """

    def __init__(self, device: Device = CPU) -> None:
        self._on_host = device.type == "cpu"
        self._before: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # the system may not allow it
            self._forget()
            self._before = (
                _bytes("/proc/self/status", "VmRSS")
                if self._on_host
                else torch.cuda.memory_allocated()
            )

    def begin(self) -> None:
        """Forget the peak so far."""
        if self._before is not None:
            self._forget()

    def _forget(self) -> None:
        if self._on_host:
            _trim()  # allocations from kept free memory would not show
            Path("/proc/self/clear_refs").write_text("5")
        else:
            torch.cuda.reset_peak_memory_stats()

    def nbytes(self) -> int | None:
        """Return the peak since :meth:`begin`, or None if the system does not tell."""
        peak = (
            _bytes("/proc/self/status", "VmHWM")
            if self._on_host
            else torch.cuda.max_memory_allocated()
        )
        return None if self._before is None or peak is None else peak - self._before


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
