"""Launches of rotation.cu: rotate numbers before they are quantized, and back."""

from torch import Tensor

from commhooks.kernels.launcher import THREADS, blocks_for, launch
from commhooks.kernels.source import TYPES, Source, kernel_name

SOURCE = Source("rotation.cu", tuple(kernel_name("rotate", type_) for type_ in TYPES.values()))

_ROTATION = 128  # as in codecs/rotation.h


def rotate(values: Tensor, added: Tensor | None, part_length: int, inverse: bool) -> None:
    """Set ``values`` to the rotation of ``values + added``, part by part, or rotate them back.

    Both are flat and contiguous, float32 or float64.
    """
    if values.numel() == 0:
        return
    blocks = -(-part_length // _ROTATION)
    launch(
        SOURCE,
        kernel_name("rotate", TYPES[values.dtype]),
        (values, added, values.numel(), part_length, blocks, inverse),
        grid=(blocks_for(blocks, THREADS // 32), blocks_for(values.numel(), part_length), 1),
    )
