"""Launches kernels on torch's tensors and torch's current stream."""

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from commhooks.errors import CommHookError
from commhooks.kernels.loader import CudaBackend
from commhooks.kernels.source import Source

__all__ = ["BACKENDS", "Argument", "Backend", "backend_of", "launch", "require"]

_FLOAT, _INTEGER = struct.Struct("d"), struct.Struct("q")

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
        device_index: int,
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
    bits, tensor = _bits(kernel, arguments)
    backend = BACKENDS.get(tensor.device.type)
    if backend is None:
        raise CommHookError(f"{kernel}: expected tensors on a GPU, found {tensor.device}")
    if 0 in blocks:
        return
    values, parameters = _room.of(len(bits))
    values[:] = bits
    threads = (block, 1, 1)
    index = tensor.get_device()
    backend.launch(source, kernel, blocks, threads, shared_bytes, parameters, index)


def _bits(kernel: str, arguments: Sequence[Argument]) -> tuple[list[int], Tensor]:
    """8 bytes for each argument, as a number; and one of the tensors."""
    tensor: Tensor | None = None
    index = -1
    bits: list[int] = []
    for argument in arguments:
        if isinstance(argument, int):  # what exceeds 63 bits wraps around
            bits.append(argument)
        elif isinstance(argument, Tensor):
            if tensor is None:
                tensor, index = argument, argument.get_device()
            if argument.get_device() != index or not argument.is_contiguous():
                raise CommHookError(
                    f"{kernel}: expected contiguous tensors on one device, found shape "
                    f"{tuple(argument.shape)} with strides {argument.stride()} on "
                    f"{argument.device}, beside one on {tensor.device}"
                )
            bits.append(argument.data_ptr())
        else:
            bits.append(0 if argument is None else _INTEGER.unpack(_FLOAT.pack(argument))[0])
    if tensor is None:
        raise CommHookError(f"{kernel}: expected tensors on a GPU, found none")
    return bits, tensor


class _Room(threading.local):
    """Memory for parameters, one per thread; the driver copies them in a launch."""

    def __init__(self) -> None:
        self._by_count: dict[int, tuple[Any, Any]] = {}

    def of(self, count: int) -> tuple[Any, Any]:
        """So many values of 8 bytes, and the address of each."""
        if count not in self._by_count:
            values = (ctypes.c_int64 * count)()
            first = ctypes.addressof(values)
            addresses = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
            self._by_count[count] = values, addresses
        return self._by_count[count]


_room = _Room()
