"""Natural compression: powers of two, rounded at random such that the mean is exact.

Horváth, Ho, Horváth, Sahu, Canini, Richtárik: Natural Compression for Distributed Deep Learning,
MSML 2022, https://arxiv.org/abs/1905.10988 (definition 1).

    x between 2^a and 2^(a+1):  the upper with probability (x - 2^a) / 2^a, else the lower

The variance is at most x²/8. Codes have a sign and 7 bits of exponent, counted from the largest
number of the block, instead of the paper's 8; what is below 2^-126 of it is sent as that or as 0.
"""

from dataclasses import dataclass

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs import Codec
from commhooks.codecs import Natural as NaturalCodec
from commhooks.codecs.block import BlockSize
from commhooks.hook.registry import register_hook

__all__ = ["Natural"]


@register_hook("natural")
@dataclass
class Natural(Quantized):
    """Average in powers of two: a quarter of the bytes. Unbiased, and without a memory.

    The error is in proportion to each number, whatever others there are in its block.
    """

    block_size: BlockSize = 512
    """Numbers that share a scale. It matters for the bytes only."""

    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1905.10988"

    def codec(self) -> Codec:
        return NaturalCodec(block_size=self.block_size)
