"""The functions of ``commhooks._C`` in torch's operations: the same bits, slower.

:mod:`commhooks.native` takes it where ``commhooks._C`` is not compiled, and tests compare compiled
loops and kernels with it. It has the same names, except for the products of low-rank compression,
which are torch's anyway, the collectives made of messages, in whose place Gloo's own are used, and
what tests ask of compiled code; the types are in ``_C.pyi``.
"""

import ctypes
import struct
import threading

import torch
from torch import Tensor

from commhooks.fallback.blocks import CpuBlockCodec, rotate, round_stochastically
from commhooks.fallback.sparse import (
    draw_indices,
    pack_indices,
    scatter_add,
    select_above,
    select_largest,
    select_largest_of_chunks,
    unpack_indices,
)

__all__ = [
    "CpuBlockCodec",
    "all_finite",
    "draw_indices",
    "pack_indices",
    "rotate",
    "round_stochastically",
    "scatter_add",
    "select_above",
    "select_largest",
    "select_largest_of_chunks",
    "unpack_indices",
    "write_arguments",
]


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all numbers are finite, as a () bool tensor on the tensor's device."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


_written = threading.local()


def write_arguments(arguments: tuple[Tensor | int | float | None, ...]) -> tuple[str, int, int]:
    """Write the arguments; return type and index of the device, and the address of the addresses.

    They are valid until the next call in this thread. Raises ValueError unless there are tensors,
    contiguous and on one device.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if not tensors:
        raise ValueError("expected tensors on a GPU, found none")
    device = tensors[0].device
    if not all(tensor.is_contiguous() and tensor.device == device for tensor in tensors):
        found = [(tuple(t.shape), t.stride(), str(t.device)) for t in tensors]
        raise ValueError(f"expected contiguous tensors on one device, found {found}")
    words = b"".join(map(_word, arguments))
    _written.values = ctypes.create_string_buffer(words)
    first = ctypes.addressof(_written.values)
    addresses = range(first, first + len(words), 8)
    _written.addresses = (ctypes.c_uint64 * len(addresses))(*addresses)
    return device.type, device.index or 0, ctypes.addressof(_written.addresses)


def _word(argument: Tensor | int | float | None) -> bytes:
    if isinstance(argument, float):
        return struct.pack("d", argument)
    value = argument.data_ptr() if isinstance(argument, Tensor) else argument or 0
    return struct.pack("Q", value % 2**64)
