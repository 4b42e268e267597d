"""Integers of 8 or 4 bits, scaled block by block. Wire: 1 or 1/2 byte per number, and scales.

    scale = max |x| / L    code = round(x / scale), from -L to L    decoded = code · scale

with L = 127 or 7 and x the numbers of one block. The error of a number is at most half a scale, or
a whole one with stochastic rounding.
"""

from dataclasses import dataclass
from typing import ClassVar

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs import Codec, Levels
from commhooks.codecs.block import BlockSize
from commhooks.hook.registry import register_hook

__all__ = ["Int4", "Int8"]


@dataclass
class _Integer(Quantized):
    """Average in integers of ``bits``, scaled block by block."""

    bits: ClassVar[int]

    block_size: BlockSize = 256
    """Numbers that share a scale. Smaller: closer to the average, more bytes."""
    stochastic: bool = False
    """Round up or down at random, such that the mean is exact; else to the nearest. Without error
    feedback this is unbiased, with it the errors are only larger."""
    error_feedback: bool = True
    """Add what a step did not send to the next gradient. Without, nearest rounding is biased."""

    @property
    def feeds_back(self) -> bool:
        return self.error_feedback

    def codec(self) -> Codec:
        return Levels(self.bits, stochastic=self.stochastic, block_size=self.block_size)


@register_hook("int8")
@dataclass
class Int8(_Integer):
    """Average in 8-bit integers with a scale per block: a quarter of the bytes of float32.

    Biased in each step, exact over steps: what was rounded away is sent later. Unbiased with
    ``stochastic=True, error_feedback=False``.
    """

    bits = 8
    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"


@register_hook("int4")
@dataclass
class Int4(_Integer):
    """Average in 4-bit integers with a scale per block: an eighth of the bytes of float32.

    Biased in each step, exact over steps: what was rounded away is sent later. Unbiased with
    ``stochastic=True, error_feedback=False``.
    """

    bits = 4
    wire = "1/2 byte per element and 4 per block, in an all-to-all and an all-gather"

    block_size: BlockSize = 128
