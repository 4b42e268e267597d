"""4-bit floating point numbers, times the scale of their group."""

from typing import Literal

from commhooks import _C
from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels

__all__ = ["Fp4Codec"]

_GROUPS = {"mxfp4": 32, "nvfp4": 16, "e3m0": 0}


class Fp4Codec(BlockCodec):
    """Encode as "mxfp4", "nvfp4" or "e3m0", rounded to nearest even.

    "mxfp4" and "nvfp4" have the numbers of e2m1, 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their
    negatives. The numbers of a block are divided into groups with a scale of one byte each. In
    "mxfp4", of the OCP Microscaling Formats, a group has 32 numbers and the scale is a power of
    two, so numbers above 6 scales become 6; the scale of the block is 1. In "nvfp4" a group has 16
    numbers and the scale is an e4m3 number times the scale of the block, which NVIDIA's format has
    per tensor.

    "e3m0", of Streaming DiLoCo, has 0, 0.25, 0.5, 1, 2, 4, 8 and 16, and their negatives, times the
    scale of the block, which maps its largest magnitude to 16.
    """

    def __init__(
        self, number_format: Literal["mxfp4", "nvfp4", "e3m0"], *, block_size: int = 1024
    ) -> None:
        loops = _C.fp4_codec(number_format, block_size)
        kernel = "E3M0" if number_format == "e3m0" else number_format.capitalize()
        gpu = BlockKernels(kernel, kernel, 4, block_size, group=_GROUPS[number_format])
        super().__init__(loops, gpu)
