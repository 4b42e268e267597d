"""Powers of two."""

from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels
from reducer import _C

__all__ = ["Natural"]


class Natural(BlockCodec):
    """A sign and a power of two in 8 bits, rounded up or down such that the mean is exact.

    The scale is the power of two at or above the largest number of the block; 127 powers of two
    count down from it, and the last step is zero.
    """

    def __init__(self, *, block_size: int) -> None:
        gpu = BlockKernels("Natural", "Natural", 8, block_size)
        super().__init__(_C.natural_codec(block_size), gpu)
