"""Launch kernels with torch's tensors on torch's current stream."""

from collections.abc import Iterable

import torch
from torch import Tensor

from commhooks import native
from commhooks.errors import CommHookError
from commhooks.kernels.loader import CudaBackend
from commhooks.kernels.source import Source

THREADS = 256
"""Threads per block, unless a launch says otherwise."""

STREAMING_BLOCKS = 2048
"""The most blocks for one pass over a tensor."""

Argument = Tensor | int | float | None
"""An argument of a kernel: a pointer to a tensor's memory, an integer of type ``long long``, a
``double``, or a null pointer."""


BACKENDS: dict[str, CudaBackend] = {"cuda": CudaBackend()}
"""The backends by type of device. Other tensors are processed by compiled loops on the CPU."""


def kernel_backend_of(tensor: Tensor) -> CudaBackend | None:
    """Return the backend for this tensor, or None if a loop on the CPU processes it."""
    return BACKENDS.get(tensor.device.type)


def require(device: torch.device) -> None:
    """Raise CommHookError if tensors on ``device`` need kernels that cannot run."""
    backend = BACKENDS.get(device.type)
    if backend is not None:
        backend.require(device)


def require_for(tensors: Iterable[Tensor]) -> None:
    """Raise CommHookError if a device of ``tensors`` needs kernels that cannot run."""
    for device in {tensor.device for tensor in tensors}:
        require(device)


def launch(
    source: Source,
    kernel: str,
    arguments: tuple[Argument, ...],
    *,
    grid: int | tuple[int, int, int],
    block: int = THREADS,
) -> None:
    """Queue a kernel on torch's current stream of the tensors' device. Does not synchronize.

    ``kernel`` is one of ``source.kernels``, ``grid`` the number of thread blocks (nothing is
    launched if it is 0), and ``block`` the number of threads per block. Tensors must be contiguous
    and on one device. They may be freed right after the call, because torch's allocator follows the
    order of the stream.

    Raises CommHookError if the tensors do not fit, or if the driver rejects the launch.
    """
    try:
        device, index, parameters = native.write_arguments(arguments)
    except ValueError as error:
        raise CommHookError(f"{kernel}: {error}") from None
    backend = BACKENDS.get(device)
    if backend is None:
        raise CommHookError(f"{kernel}: expected tensors on a GPU, found {device}")
    blocks = (grid, 1, 1) if isinstance(grid, int) else grid
    if 0 not in blocks:
        backend.launch(source, kernel, blocks, block, parameters, len(arguments), index)


def blocks_for(elements: int, per_block: int = THREADS) -> int:
    """Return how many blocks have as many elements."""
    return -(-elements // per_block)


def streaming_blocks(tensor: Tensor) -> int:
    """Return the blocks for one pass over a tensor, in vectors of 16 bytes, see vector.h."""
    return min(STREAMING_BLOCKS, blocks_for(tensor.nbytes, 16 * THREADS))
