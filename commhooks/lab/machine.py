"""This machine: its cores and memory, a description, and whether ranks fit on it."""

import contextlib
import ctypes
import gc
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from commhooks.cluster import CPU, Device
from commhooks.costs.units import format_bytes
from commhooks.errors import CommHookError
from commhooks.lab.models import Workload

_RANKS_PER_CORE = 8
_PROCESS_BYTES = 400_000_000  # of a process that has imported torch
_CUDA_PROCESS_BYTES = 2_000_000_000  # with the libraries of CUDA
_CONTEXT_BYTES = 2_000_000_000  # of a process on a CUDA device, with three NCCL communicators
_COPIES = 8
"""Tensors the size of the gradients: they, buckets, errors and other state, temporary memory."""


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


class LimitError(CommHookError):
    """This machine cannot run the ranks."""


class ModelSize(NamedTuple):
    """The bytes of a model's parameters and of their gradients, and their relative precision."""

    parameter_bytes: int
    gradient_bytes: int
    precision: float


def check_model(workload: Workload, world_size: int) -> ModelSize:
    """Make the model and an input, and check that ``world_size`` ranks fit on this machine."""
    on_host = replace(workload, device=CPU)
    module = on_host.make_module()
    on_host.make_input(module, 0)
    parameters = [p for p in module.parameters() if p.requires_grad]
    size = ModelSize(
        sum(parameter.nbytes for parameter in module.parameters()),
        sum(parameter.nbytes for parameter in parameters),
        max(torch.finfo(parameter.dtype).eps for parameter in parameters),
    )
    check_limits(world_size, size, workload.device)
    return size


def check_limits(world_size: int, model: ModelSize, device: Device = CPU) -> None:
    """Raise LimitError if this machine cannot run the ranks.

    The limits are 8 ranks per core, and for each rank memory of 0.4 GB, the parameters, and eight
    times the gradients, however many entries take turns. Activations are not counted. On CUDA it is
    the device's memory, which ranks may share, with 2 GB in place of 0.4 GB; and 2 GB and the
    parameters of the machine's.
    """
    most = _RANKS_PER_CORE * cores()
    if world_size > most:
        raise LimitError(
            f"{world_size} ranks are more than the {most} that can run on {cores()} cores (at most "
            f"{_RANKS_PER_CORE} per core); `commhooks simulate` predicts larger world sizes"
        )
    free, sharing = device.free_bytes(), device.sharing(world_size)
    on_host = (_PROCESS_BYTES, _COPIES) if free is None else (_CUDA_PROCESS_BYTES, 0)
    on_device = f"{sharing} ranks that share a device need"
    if sharing == 1:
        on_device = "each rank, on its own device, needs"
    for ranks, these, available, own_bytes, copies in (
        (world_size, f"{world_size} ranks need", _bytes("/proc/meminfo", "MemAvailable"), *on_host),
        (sharing, on_device, free, _CONTEXT_BYTES, _COPIES),
    ):
        needed = ranks * (own_bytes + model.parameter_bytes + copies * model.gradient_bytes)
        if available is not None and needed > available:
            process, parameters, gradients = map(format_bytes, (own_bytes, *model[:2]))
            raise LimitError(
                f"{these} about {format_bytes(needed)}, and {format_bytes(available)} are free: "
                f"for each {process} of a process, "
                f"{parameters} of parameters and {copies} x {gradients} of gradients, buckets, "
                "errors and temporary memory; use fewer ranks or a smaller model"
            )


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _bytes(path: str, name: str) -> int | None:
    """Return a number of bytes that the system tells, or None if it does not."""
    text = _fields(path).get(name)
    return None if text is None else int(text.split()[0]) * 1024  # "123 kB"


def _fields(path: str) -> dict[str, str]:
    """Return the lines ``name: value`` of a file; none if it does not exist."""
    if not Path(path).exists():
        return {}
    pairs = (line.partition(":") for line in Path(path).read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
