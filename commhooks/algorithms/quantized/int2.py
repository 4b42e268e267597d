"""int2: integers of 2 bits, with one signed scale per block, and error feedback.

::

    def quantize(x):                                   # x: (blocks, block_size)
        largest = x.gather(1, x.abs().argmax(1, keepdim=True))
        scale = largest / -2                           # the largest number becomes -2 * scale
        return scale * (x / scale).round().clamp(-2, 1)  # sent: the scales and the integers

    x = gradient + error
    error = x - quantize(x)
    y = mean_over_ranks(quantize(x)) + average_error   # all-to-all: rank j averages part j
    average_error = y - quantize(y)
    return quantize(y)                                 # all-gather

Two bits have four codes. Levels on both sides of zero, as ``int4`` has them, would use three. Here
the fourth one is at the side of the largest number, which is sent exactly; numbers of the other
sign are clamped to half of its magnitude. No number changes by more than its own magnitude.
"""

from dataclasses import dataclass

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.levels import LevelCodec
from commhooks.codecs.rotated import RotatedCodec
from commhooks.hook.registry import register_hook

__all__ = ["Int2"]


@register_hook("int2")
@dataclass
class Int2(Quantized):
    """Average in 2-bit integers with a scale per block: 1/13 of the bytes of float32.

    Biased in each step but exact over steps, because errors are sent later. For unbiased averages
    in 2 bits, use ``qsgd`` with one level.
    """

    block_size: BlockSize = 64
    """How many numbers share a scale. Smaller blocks: closer to the average, more bytes."""
    error_feedback: bool = True
    """Add the error of a step to the next gradient. Without it, the result is biased."""
    rotate: bool = False
    """Rotate every 128 numbers before they are quantized, as ``int4`` does."""

    wire = "1/4 byte per element and 4 per block, in an all-to-all and an all-gather"

    @property
    def uses_error_feedback(self) -> bool:
        return self.error_feedback

    def make_codec(self) -> BlockCodec:
        codec = LevelCodec(2, norm="signed_max", block_size=self.block_size)
        return RotatedCodec(codec) if self.rotate else codec
