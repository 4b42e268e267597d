"""TernGrad: -1, 0 or 1 times a scale, rounded at random such that the mean is exact.

Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad: Ternary Gradients to Reduce Communication in Distributed
Deep Learning, NeurIPS 2017, https://arxiv.org/abs/1705.07878.

    scale = max |x|    code = sign(x) with probability |x| / scale, else 0    decoded = code · scale

with x the numbers of one block, first clipped to ``clip`` of their root mean squares (section 3.1,
and equation 14). The paper's workers share one scale per layer, so that its server can send sums of
codes on, of 2·N + 1 levels. Here each rank and block has a scale of its own, and averages are
rounded once more, to 15 levels, unclipped: with three, or clipped, most is lost on the way back.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs import Codec, Levels
from commhooks.codecs.block import BlockSize
from commhooks.hook.options.constraints import Ge
from commhooks.hook.registry import register_hook

__all__ = ["TernGrad"]


@register_hook("terngrad")
@dataclass
class TernGrad(Quantized):
    """Average in three levels, 2 bits per number, and 4 on the way back: 1/10 of float32's bytes.

    Unbiased but for what is clipped, and without a memory. Varies much: the smaller a number is
    beside the largest of its block, the more; see docs/hooks/quantized.md.
    """

    clip: Annotated[float, Ge(0)] = 2.5
    """Cut a rank's numbers off beyond so many root mean squares of their block; 0: none, and no
    bias."""
    block_size: BlockSize = 512
    """Numbers that share a scale; the paper's is a layer. Smaller: less variance, more bytes."""

    wire = "1/4 byte per element in an all-to-all, 1/2 in an all-gather, and 4 per block in each"
    paper = "https://arxiv.org/abs/1705.07878"

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]
        """Never: see Note [Errors that do not grow] in algorithms/quantized/base.py."""
        return False

    def codec(self) -> Codec:
        return Levels(2, clip=self.clip or math.inf, stochastic=True, block_size=self.block_size)

    def average_codec(self) -> Codec:
        """Does not clip: what ranks have clipped would be clipped again, to much less if sparse."""
        return Levels(4, stochastic=True, block_size=self.block_size)
