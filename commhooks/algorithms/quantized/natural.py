"""natural: natural compression, powers of two with unbiased stochastic rounding.

::

    def quantize(x):                                       # x: (blocks, block_size)
        power = x.abs().log2().floor().exp2()              # the power of two at or below |x|
        is_up = torch.rand_like(x) < x.abs() / power - 1   # so that the expected value is x
        return x.sign() * power * (1 + is_up)              # sent: signs and exponents

    y = mean_over_ranks(quantize(gradient))                # all-to-all: rank j averages part j
    return quantize(y)                                     # all-gather

The variance is at most x²/8. A code has a sign and 7 bits of exponent instead of the paper's 8: the
exponent counts from the largest number of the block. Numbers below 2^-126 times that number are
rounded at random to it or to 0.

Horváth, Ho, Horváth, Sahu, Canini, Richtárik: Natural Compression for Distributed Deep Learning,
MSML 2022, https://arxiv.org/abs/1905.10988 (definition 1).
"""

from dataclasses import dataclass

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.natural import NaturalCodec
from commhooks.hook.registry import register_hook

__all__ = ["Natural"]


@register_hook("natural")
@dataclass
class Natural(Quantized):
    """Average in powers of two: a quarter of the bytes of float32. Unbiased, and has no state.

    The error of a number is proportional to the number, whatever else is in its block.
    """

    block_size: BlockSize = 512
    """How many numbers share a scale. It affects only the bytes."""

    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1905.10988"

    def make_codec(self) -> BlockCodec:
        return NaturalCodec(block_size=self.block_size)
