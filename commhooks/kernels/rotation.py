"""Launches of rotation.cu: rotate numbers before they are quantized, and back."""

from torch import Tensor

from commhooks.kernels.elements import TYPES
from commhooks.kernels.launcher import launch
from commhooks.kernels.source import Source

__all__ = ["SOURCE", "rotate"]

_KERNELS = {dtype: f"commhooks::kernels::rotate<{type_}>" for dtype, type_ in TYPES.items()}
SOURCE = Source("rotation.cu", tuple(_KERNELS.values()))

_ROTATION = 128  # as in codecs/rotation.h
_WARPS = 8


def rotate(values: Tensor, added: Tensor | None, part_length: int, inverse: bool) -> None:
    """Set ``values`` to the rotation of ``values + added``, part by part, or rotate them back.

    Both are flat and contiguous, float32 or float64.
    """
    if values.numel() == 0:
        return
    blocks = -(-part_length // _ROTATION)
    launch(
        SOURCE,
        _KERNELS[values.dtype],
        (values, added, values.numel(), part_length, blocks, inverse),
        grid=(-(-blocks // _WARPS), -(-values.numel() // part_length), 1),
        block=32 * _WARPS,
    )
