"""Launches kernels on torch's tensors and torch's current stream."""

from typing import Protocol

import torch
from torch import Tensor

from commhooks import _C
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
        parameters: int,
        count: int,
        device_index: int,
    ) -> None:
        """Runs one of the source's kernels.

        ``parameters``: the address of an array with that of each of ``count`` values.
        """


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
    arguments: tuple[Argument, ...],
    *,
    grid: int | tuple[int, int, int],
    block: int,
    shared_bytes: int = 0,
) -> None:
    """Queues a kernel on torch's current stream of the tensors' device. Does not synchronize.

    ``kernel``: one of ``source.kernels``. ``grid``: thread blocks; with none nothing is launched.
    ``block``: threads in each. ``shared_bytes``: of dynamic shared memory. Tensors must be on one
    device and contiguous; they may be freed at once, as torch's allocator keeps to stream order.

    Raises CommHookError if they are not, or if the launch is refused.
    """
    try:
        device, index, parameters = _C.write_arguments(arguments)
    except ValueError as error:
        raise CommHookError(f"{kernel}: {error}") from None
    backend = BACKENDS.get(device)
    if backend is None:
        raise CommHookError(f"{kernel}: expected tensors on a GPU, found {device}")
    blocks = (grid, 1, 1) if isinstance(grid, int) else grid
    if 0 not in blocks:
        threads = (block, 1, 1)
        backend.launch(
            source, kernel, blocks, threads, shared_bytes, parameters, len(arguments), index
        )
