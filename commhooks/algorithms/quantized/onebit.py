"""onebit: one bit per number with error feedback, as 1-bit Adam averages its momentum.

::

    def quantize(x):                                       # x: (blocks, block_size)
        scale = x.square().mean(1, keepdim=True).sqrt()
        return scale * x.sign()                            # sent: the scales and the signs

    x = gradient + error
    error = x - quantize(x)
    y = mean_over_ranks(quantize(x)) + average_error       # all-to-all: rank j averages part j
    average_error = y - quantize(y)
    return quantize(y)                                     # all-gather

This is only the averaging. The paper also freezes Adam's variance after a warm-up, which is the
optimizer's task.

Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He: 1-bit Adam: Communication Efficient
Large-Scale Training with Adam's Convergence Speed, ICML 2021, https://arxiv.org/abs/2102.02888
(section 3).
"""

from dataclasses import dataclass

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.sign import SignCodec
from commhooks.hook.registry import register_hook

__all__ = ["OneBit"]


@register_hook("onebit")
@dataclass
class OneBit(Quantized):
    """Average in one bit per number, with the norm of the gradient: 1/25 of the bytes of float32.

    Biased in each step but exact over steps, because errors are sent later. It always uses error
    feedback, and should start with exact averages, as in the paper: put it into ``schedule``.
    docs/hooks/onebit.md tells what is lost with and without such a start.
    """

    block_size: BlockSize = 128
    """How many numbers share a scale. Smaller blocks: closer to the average, more bytes. Larger
    blocks mix parameters whose gradients differ much in size."""

    wire = "1/8 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/2102.02888"

    @property
    def uses_error_feedback(self) -> bool:
        return True

    def make_codec(self) -> BlockCodec:
        return SignCodec("root_mean", block_size=self.block_size)
