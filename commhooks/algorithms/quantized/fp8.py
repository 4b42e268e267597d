"""fp8: 8-bit floating point, with one scale per block, and error feedback.

::

    def quantize(x):                                       # x: (blocks, block_size)
        scale = x.abs().amax(1, keepdim=True) / 448        # the format's largest; e5m2: 57344
        return scale * (x / scale).to(torch.float8_e4m3fn).float()  # sent: the scales and 8 bits

    x = gradient + error
    error = x - quantize(x)
    y = mean_over_ranks(quantize(x)) + average_error       # all-to-all: rank j averages part j
    average_error = y - quantize(y)
    return quantize(y)                                     # all-gather

Unlike with integers, the error of a number is proportional to the number: at most 1/16 of it in
e4m3, 1/8 in e5m2.

Formats: Micikevicius et al.: FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433.
"""

from dataclasses import dataclass
from typing import Literal

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.fp8 import Fp8Codec
from commhooks.hook.registry import register_hook

__all__ = ["Fp8"]


@register_hook("fp8")
@dataclass
class Fp8(Quantized):
    """Average in 8-bit floating point with a scale per block: a quarter of the bytes of float32.

    Biased in each step but exact over steps, because errors are sent later.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    """e4m3 has 3 bits of mantissa, e5m2 has 2 and a wider range."""
    block_size: BlockSize = 256
    """How many numbers share a scale. Smaller blocks: fewer numbers lose digits, more bytes."""
    error_feedback: bool = True
    """Add the error of a step to the next gradient. Without it, the result is biased."""

    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/2209.05433"

    @property
    def uses_error_feedback(self) -> bool:
        return self.error_feedback

    def make_codec(self) -> BlockCodec:
        return Fp8Codec(self.format, block_size=self.block_size)
