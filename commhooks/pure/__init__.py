"""What ``commhooks._C`` does on the CPU, in NumPy: the same bits, slower.

:mod:`commhooks.extensions` puts this package in the place of ``commhooks._C`` where that was not
compiled. It has the same names, except for the products of low-rank compression, which go through
torch; the types are in ``_C.pyi``. The formulas are those of kernels/codecs/*.h, under the same
names.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.pure.block_codec import (
    CpuBlockCodec,
    fp4_codec,
    fp8_codec,
    level_codec,
    natural_codec,
    sign_codec,
)
from commhooks.pure.indices import draw_indices, pack_indices, scatter_add, unpack_indices
from commhooks.pure.kernel_arguments import write_arguments
from commhooks.pure.rotation import rotate
from commhooks.pure.selection import select_above, select_largest, select_largest_of_chunks
from commhooks.pure.works import CompletionQueue, join_works, ring_gather

__all__ = [
    "CompletionQueue",
    "CpuBlockCodec",
    "all_finite",
    "draw_indices",
    "fp4_codec",
    "fp8_codec",
    "instruction_sets",
    "join_works",
    "level_codec",
    "locks_taken_with_gil",
    "natural_codec",
    "pack_indices",
    "ring_gather",
    "rotate",
    "scatter_add",
    "select_above",
    "select_largest",
    "select_largest_of_chunks",
    "sign_codec",
    "unpack_indices",
    "use_instruction_set",
    "write_arguments",
]


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all numbers are finite, as a () bool tensor on the tensor's device."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def instruction_sets() -> Sequence[str]:
    """Return no names: NumPy chooses its instructions."""
    return []


def use_instruction_set(name: str) -> None:
    """Raise RuntimeError: there is nothing to choose."""
    raise RuntimeError(f"Expected one of [], found '{name}': NumPy chooses its instructions.")


def locks_taken_with_gil() -> int:
    """Return 0: there are no locks in C++."""
    return 0
