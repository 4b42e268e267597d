"""8-bit floating point numbers, times the scale of their block."""

from typing import Literal

from commhooks import _C
from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels

__all__ = ["Fp8Codec"]


class Fp8Codec(BlockCodec):
    """Encode as ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, with torch's rounding.

    The scale maps the largest magnitude of the block to the largest number of the format, 448 or
    57344. So nothing overflows, and the whole range is used.
    """

    def __init__(self, number_format: Literal["e4m3", "e5m2"], *, block_size: int) -> None:
        loops = _C.fp8_codec(number_format, block_size)
        kernel = number_format.upper()
        super().__init__(loops, BlockKernels(kernel, kernel, 8, block_size))
