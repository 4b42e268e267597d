"""int8, int4 and int2: integers of 8, 4 or 2 bits, with one scale per block, and error feedback."""

from dataclasses import dataclass

from commhooks.algorithms.quantized.base import QuantizedWithFeedback
from commhooks.codecs.block import BlockSize
from commhooks.codecs.formats import Format, integers
from commhooks.hook.registry import register_hook


@register_hook("int8")
@dataclass
class Int8(QuantizedWithFeedback):
    """Average in 8-bit integers with a scale per block: a quarter of the bytes of float32.

    ::

        def quantize(x):                                   # x: (blocks, block_size)
            scale = x.abs().amax(1, keepdim=True) / 127
            return scale * (x / scale).round()             # sent: the scales and the integers

    The error of a number is at most half a scale, or one scale with stochastic rounding. Unbiased
    with ``stochastic=True, error_feedback=False``.
    """

    stochastic: bool = False
    """Round up or down at random, so that the expected value is exact; otherwise to nearest. This
    is unbiased without error feedback; with it, it only makes errors larger."""

    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"

    def number_format(self) -> Format:
        return integers(8, stochastic=self.stochastic)


@register_hook("int4")
@dataclass
class Int4(Int8):
    """Average in 4-bit integers with a scale per block: an eighth of the bytes of float32.

    As :class:`Int8`, with the scale ``x.abs().amax(1, keepdim=True) / 7``.
    """

    block_size: BlockSize = 128
    rotate: bool = False
    """Rotate every 128 numbers before they are quantized, by random signs and a Hadamard matrix. A
    few large numbers then cost the others less. Same bytes; encoding takes up to two more passes
    over the memory, decoding one."""

    wire = "1/2 byte per element and 4 per block, in an all-to-all and an all-gather"

    def number_format(self) -> Format:
        return integers(4, stochastic=self.stochastic)


@register_hook("int2")
@dataclass
class Int2(QuantizedWithFeedback):
    """Average in 2-bit integers with a scale per block: 1/13 of the bytes of float32.

    ::

        def quantize(x):                                   # x: (blocks, block_size)
            largest = x.gather(1, x.abs().argmax(1, keepdim=True))
            scale = largest / -2                           # the largest number becomes -2 * scale
            return scale * (x / scale).round().clamp(-2, 1)  # sent: the scales and the integers

    Two bits have four codes. Levels on both sides of zero, as ``int4`` has them, would use three.
    Here the fourth one is at the side of the largest number, which is sent exactly; numbers of the
    other sign are clamped to half of its magnitude. No number changes by more than its own
    magnitude. For unbiased averages in 2 bits, use ``qsgd`` with one level.
    """

    block_size: BlockSize = 64
    rotate: bool = False
    """Rotate every 128 numbers before they are quantized, as ``int4`` does."""

    wire = "1/4 byte per element and 4 per block, in an all-to-all and an all-gather"

    def number_format(self) -> Format:
        return integers(2, norm="signed_max")
