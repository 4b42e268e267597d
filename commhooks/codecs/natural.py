"""Powers of two, times the scale of their block."""

from commhooks import _C
from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels

__all__ = ["NaturalCodec"]


class NaturalCodec(BlockCodec):
    """Encode as a sign and a power of two in 8 bits, with unbiased stochastic rounding.

    The scale is the smallest power of two that is not below the largest magnitude of the block.
    Codes stand for the 127 powers of two from 1 downwards, and for zero.
    """

    def __init__(self, *, block_size: int) -> None:
        gpu = BlockKernels("Natural", "Natural", 8, block_size)
        super().__init__(_C.natural_codec(block_size), gpu)
