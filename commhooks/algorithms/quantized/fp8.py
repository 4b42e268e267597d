"""8-bit floating point, scaled block by block. Wire: 1 byte per number, and scales.

    scale = max |x| / M    code = x / scale in 8-bit floating point    decoded = code · scale

with M the largest number of the format, and x the numbers of one block. Unlike with integers, the
error of a number is in proportion to the number: up to 1/16 of it in e4m3, 1/8 in e5m2.

Formats: Micikevicius et al.: FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433.
"""

from dataclasses import dataclass
from typing import Literal

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs import Codec
from commhooks.codecs import Fp8 as Fp8Codec
from commhooks.codecs.block import BlockSize
from commhooks.hook.registry import register_hook

__all__ = ["Fp8"]


@register_hook("fp8")
@dataclass
class Fp8(Quantized):
    """Average in 8-bit floating point with a scale per block: a quarter of the bytes of float32.

    Biased in each step, exact over steps: what was rounded away is sent later.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    """e4m3 has 3 bits of mantissa, e5m2 has 2 and a wider range."""
    block_size: BlockSize = 256
    """Numbers that share a scale. Smaller: more of them keep all their digits, more bytes."""
    error_feedback: bool = True
    """Add what a step did not send to the next gradient. Without, the result is biased."""

    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/2209.05433"

    @property
    def feeds_back(self) -> bool:
        return self.error_feedback

    def codec(self) -> Codec:
        return Fp8Codec(self.format, block_size=self.block_size)
