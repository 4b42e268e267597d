"""int8 and int4: integers of 8 or 4 bits, with one scale per block, and error feedback.

::

    def quantize(x):                                   # x: (blocks, block_size)
        scale = x.abs().amax(1, keepdim=True) / 127    # int8; 7 for int4
        return scale * (x / scale).round()             # sent: the scales and the integers

    x = gradient + error
    error = x - quantize(x)
    y = mean_over_ranks(quantize(x)) + average_error   # all-to-all: rank j averages part j
    average_error = y - quantize(y)
    return quantize(y)                                 # all-gather

The error of a number is at most half a scale, or one scale with stochastic rounding.
"""

from dataclasses import dataclass
from typing import ClassVar

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.levels import LevelCodec
from commhooks.codecs.rotated import RotatedCodec
from commhooks.hook.registry import register_hook

__all__ = ["Int4", "Int8"]


@dataclass
class _Integer(Quantized):
    """Average in integers of ``bits`` with a scale per block."""

    bits: ClassVar[int]

    block_size: BlockSize = 256
    """How many numbers share a scale. Smaller blocks: closer to the average, more bytes."""
    stochastic: bool = False
    """Round up or down at random, so that the expected value is exact; otherwise to nearest. This
    is unbiased without error feedback; with it, it only makes errors larger."""
    error_feedback: bool = True
    """Add the error of a step to the next gradient. Without it, rounding to nearest is biased."""

    @property
    def uses_error_feedback(self) -> bool:
        return self.error_feedback

    def make_codec(self) -> BlockCodec:
        return LevelCodec(self.bits, stochastic=self.stochastic, block_size=self.block_size)


@register_hook("int8")
@dataclass
class Int8(_Integer):
    """Average in 8-bit integers with a scale per block: a quarter of the bytes of float32.

    Biased in each step but exact over steps, because errors are sent later. Unbiased with
    ``stochastic=True, error_feedback=False``.
    """

    bits = 8
    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"


@register_hook("int4")
@dataclass
class Int4(_Integer):
    """Average in 4-bit integers with a scale per block: an eighth of the bytes of float32.

    Biased in each step but exact over steps, because errors are sent later. Unbiased with
    ``stochastic=True, error_feedback=False``.
    """

    bits = 4
    wire = "1/2 byte per element and 4 per block, in an all-to-all and an all-gather"

    block_size: BlockSize = 128
    rotate: bool = False
    """Rotate every 128 numbers before they are quantized, by random signs and a Hadamard matrix. A
    few large numbers then cost the others less. Same bytes; encoding takes up to two more passes
    over the memory, decoding one."""

    def make_codec(self) -> BlockCodec:
        codec = super().make_codec()
        return RotatedCodec(codec) if self.rotate else codec
