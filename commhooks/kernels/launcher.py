"""Launches kernels on torch's tensors and torch's current stream."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from commhooks.errors import CommHookError
from commhooks.kernels.loader import CudaBackend
from commhooks.kernels.source import Source

__all__ = ["BACKENDS", "Argument", "Backend", "backend_of", "launch", "require"]

Argument = Tensor | int | float | None
"""Of a kernel: a pointer to the tensor's memory, ``long long``, ``double``, a null pointer."""


class Backend(Protocol):
    """Runs kernels on tensors of one type of device."""

    def require(self, device: torch.device) -> None:
        """Raises CommHookError, with what to install, if kernels cannot run there."""

    def launch(
        self,
        source: Source,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: "ctypes.Array[ctypes.c_void_p]",
        device: torch.device,
    ) -> None:
        """Runs one of the source's kernels. ``parameters``: where the value of each is."""


BACKENDS: dict[str, Backend] = {"cuda": CudaBackend()}
"""By type of device. Tensors on others are for compiled loops on the CPU."""


def backend_of(tensor: Tensor) -> Backend | None:
    """What runs kernels on this tensor; None: nothing, it is for a loop on the CPU."""
    return BACKENDS.get(tensor.device.type)


def require(device: torch.device) -> None:
    """Raises CommHookError if tensors there are for kernels which cannot run."""
    backend = BACKENDS.get(device.type)
    if backend is not None:
        backend.require(device)


def launch(
    source: Source,
    kernel: str,
    arguments: Sequence[Argument],
    *,
    grid: int | tuple[int, int, int],
    block: int,
    shared_bytes: int = 0,
) -> None:
    """Queues a kernel on torch's current stream of the tensors' device. Does not synchronise.

    ``kernel``: one of ``source.kernels``. ``grid``: thread blocks; with none nothing is launched.
    ``block``: threads in each. ``shared_bytes``: of dynamic shared memory. Tensors must be on one
    device and contiguous; they may be freed at once, as torch's allocator keeps to stream order.

    Raises CommHookError if they are not, or if the launch is refused.
    """
    blocks = (grid, 1, 1) if isinstance(grid, int) else grid
    device = _device_of(kernel, arguments)
    if 0 in blocks:
        return
    backend = BACKENDS[device.type]
    values, parameters = _parameters(arguments)
    backend.launch(source, kernel, blocks, (block, 1, 1), shared_bytes, parameters, device)
    del values  # the driver has copied them


def _device_of(kernel: str, arguments: Sequence[Argument]) -> torch.device:
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device or not tensor.is_contiguous():
            raise CommHookError(
                f"{kernel}: expected contiguous tensors on one device, found shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, beside "
                f"one on {device}"
            )
    if device.type not in BACKENDS:
        raise CommHookError(f"{kernel}: expected tensors on a GPU, found one on {device}")
    return device


def _parameters(
    arguments: Sequence[Argument],
) -> tuple["ctypes.Array[ctypes.c_int64]", "ctypes.Array[ctypes.c_void_p]"]:
    """The values, 8 bytes each, and the address of each."""
    count = len(arguments)
    values = (ctypes.c_int64 * count)(*map(_bits, arguments))
    first = ctypes.addressof(values)
    return values, (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))


def _bits(argument: Argument) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        bits: int = struct.unpack("q", struct.pack("d", argument))[0]
        return bits
    return 0 if argument is None else argument  # what exceeds 63 bits wraps around
