"""One bit per number, with feedback of both errors, as 1-bit Adam averages its momentum.

Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He: 1-bit Adam: Communication Efficient
Large-Scale Training with Adam's Convergence Speed, ICML 2021, https://arxiv.org/abs/2102.02888
(section 3).

    scale = √(mean x²)    code = sign(x)    decoded = code · scale

with x the numbers of one block, what was not sent before included. Only the averaging is done here:
the paper also keeps Adam's variance fixed after a warm-up, which is for the optimizer to do.
"""

from dataclasses import dataclass

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs import Codec, Sign
from commhooks.codecs.block import BlockSize
from commhooks.hook.registry import register_hook

__all__ = ["OneBit"]


@register_hook("onebit")
@dataclass
class OneBit(Quantized):
    """Average in one bit per number, as long as the gradient: 1/25 of the bytes of float32.

    Biased in each step, exact over steps: what was not sent is sent later. Needs its memory, and a
    start with exact averages, as in the paper: put it into ``schedule``. What is lost with such a
    start and without is in docs/hooks/quantized.md.
    """

    block_size: BlockSize = 128
    """Numbers that share a scale. Smaller: closer to the average, more bytes. Larger blocks mix
    parameters whose gradients differ much in size."""

    wire = "1/8 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/2102.02888"

    @property
    def feeds_back(self) -> bool:
        return True

    def codec(self) -> Codec:
        return Sign("root_mean", block_size=self.block_size)
