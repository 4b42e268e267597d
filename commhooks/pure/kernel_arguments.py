"""The arguments of a CUDA kernel, in memory that the driver reads."""

import ctypes
import threading

from torch import Tensor

__all__ = ["write_arguments"]

_MOST = 32


class _Memory(threading.local):
    """Values of 8 bytes, and the address of each; every thread has its own."""

    def __init__(self) -> None:
        self.values = (ctypes.c_uint64 * _MOST)()
        start = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_uint64 * _MOST)(*range(start, start + 8 * _MOST, 8))


_memory = _Memory()


def write_arguments(arguments: tuple[Tensor | int | float | None, ...]) -> tuple[str, int, int]:
    """Write the arguments; return type and index of the device, and the address of the addresses.

    They are valid until the next call in this thread. Raises ValueError unless there are tensors,
    contiguous and on one device.
    """
    if len(arguments) > _MOST:
        raise ValueError(f"expected at most {_MOST} arguments, found {len(arguments)}")
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if not tensors:
        raise ValueError("expected tensors on a GPU, found none")
    device = tensors[0].device
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"expected contiguous tensors on one device, found shape {list(tensor.shape)} with "
                f"strides {list(tensor.stride())} on {tensor.device} and a tensor on {device}"
            )
    for position, argument in enumerate(arguments):
        _memory.values[position] = _bits(argument)
    return device.type, device.index or 0, ctypes.addressof(_memory.addresses)


def _bits(argument: Tensor | int | float | None) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return ctypes.c_uint64.from_buffer(ctypes.c_double(argument)).value
    return 0 if argument is None else int(argument) % 2**64
