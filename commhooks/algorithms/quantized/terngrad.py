"""terngrad: TernGrad, -1, 0 or 1 times a scale, with unbiased stochastic rounding.

::

    def quantize(x):                                                # x: (blocks, block_size)
        limit = clip * x.square().mean(1, keepdim=True).sqrt()
        x = x.clamp(-limit, limit)
        scale = x.abs().amax(1, keepdim=True)
        is_sent = torch.rand_like(x) < x.abs() / scale
        return scale * x.sign() * is_sent                           # sent: the scales and -1, 0, 1

    y = mean_over_ranks(quantize(gradient))                         # all-to-all
    return quantize_to_15_levels(y)                                 # all-gather

This is section 3.1 and equation 14. The paper's workers share one scale per layer, so that the
server can send sums of codes, with 2·N + 1 levels. Here each block of each rank has its own scale,
and averages are rounded once more, to 15 levels without clipping: with three levels, or clipped,
averages would lose much more.

Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad: Ternary Gradients to Reduce Communication in Distributed
Deep Learning, NeurIPS 2017, https://arxiv.org/abs/1705.07878.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.levels import LevelCodec
from commhooks.hook.options import Ge
from commhooks.hook.registry import register_hook

__all__ = ["TernGrad"]


@register_hook("terngrad")
@dataclass
class TernGrad(Quantized):
    """Average in three levels of 2 bits, and averages in 4 bits: 1/10 of the bytes of float32.

    Unbiased except for clipping, and has no state. The variance of a number is large if the number
    is small compared with the largest one of its block; see docs/hooks/terngrad.md.
    """

    clip: Annotated[float, Ge(0)] = 2.5
    """Clamp a rank's numbers to this many root mean squares of their block; 0: no clipping, and no
    bias."""
    block_size: BlockSize = 512
    """How many numbers share a scale; in the paper, a layer. Smaller blocks: less variance, more
    bytes."""

    wire = "1/4 byte per element in an all-to-all, 1/2 in an all-gather, and 4 per block in each"
    paper = "https://arxiv.org/abs/1705.07878"

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]
        """False: see Note [Errors that do not grow] in base.py."""
        return False

    def make_codec(self) -> BlockCodec:
        return LevelCodec(
            2, clip=self.clip or math.inf, stochastic=True, block_size=self.block_size
        )

    def make_average_codec(self) -> BlockCodec:
        """Return a codec without clipping, which would clamp sparse averages much more."""
        return LevelCodec(4, stochastic=True, block_size=self.block_size)
