"""8-bit floating point numbers times the scale of the block."""

from typing import Literal

from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels
from reducer import _C

__all__ = ["Fp8"]


class Fp8(BlockCodec):
    """The numbers of ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, rounded as torch does.

    The scale makes the largest number of the block the largest of the format, 448 or 57344, so that
    nothing overflows and all of its range is used.
    """

    def __init__(self, number_format: Literal["e4m3", "e5m2"], *, block_size: int) -> None:
        loops = _C.fp8_codec(number_format, block_size)
        kind = number_format.upper()
        super().__init__(loops, BlockKernels(kind, kind, 8, block_size))
