"""qsgd, terngrad and natural: stochastic rounding, unbiased and without state.

They average ``quantize(gradient)``, and quantize the averages again.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockSize
from commhooks.codecs.formats import NATURAL, Format, integers
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook


@register_hook("qsgd")
@dataclass
class QSGD(Quantized):
    """Average in a few levels with stochastic rounding. Unbiased, and has no state.

    ::

        def quantize(x):                                            # x: (blocks, block_size)
            scale = x.abs().amax(1, keepdim=True) / levels          # norm="max"
            scale = x.norm(dim=1, keepdim=True) / levels            # norm="l2"
            return scale * (x / scale + torch.rand_like(x)).floor() # sent: the scales and integers

    With few levels it leaves out too much for ``error_feedback``, which then raises an error: with
    fewer than 3, or with the norm "l2" fewer than about 0.8·√block_size.

    This is section 3.1, equation 3. Codes have a fixed width of 2, 4 or 8 bits, the smallest that
    holds all levels, instead of the paper's Elias code. That takes a single pass, and all ranks
    know the length of a message beforehand.

    Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding, NeurIPS 2017, https://arxiv.org/abs/1610.02132.
    """

    block_size: BlockSize = 128
    """Numbers per scale; the paper calls it the bucket size and takes 512. Smaller
    blocks: less variance, more bytes."""
    levels: Annotated[int, Limits(ge=1, le=127)] = 7
    """The number of levels above zero; there are as many below. One level takes 2 bits per number,
    2 to 7 take 4 bits, and more take 8."""
    norm: Literal["max", "l2"] = "max"
    """The norm of a block: its largest magnitude, as in the paper's experiments, or its Euclidean
    norm, as in the paper's analysis, which sends more zeros and has a larger variance."""

    wire = "2, 4 or 8 bits per element and 4 bytes per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1610.02132"

    @property
    def tells_contribution(self) -> bool:
        """Whether there are enough levels for Note [Errors that do not grow], see base.py.

        Rounding changes a number by at most scale = max |x| / levels. The expected square of the
        change is at most scale² / 4, summed over B numbers at most ‖x‖²·B / (4·levels²).
        """
        share = 1 / self.levels if self.norm == "max" else self.block_size / (4 * self.levels**2)
        return (1 + share) ** 2 < 2

    def number_format(self) -> Format:
        bits: Literal[2, 4, 8] = 2 if self.levels < 2 else 4 if self.levels < 8 else 8
        return integers(bits, self.levels, norm=self.norm, stochastic=True)


@register_hook("terngrad")
@dataclass
class TernGrad(Quantized):
    """Average in three levels of 2 bits, and averages in 4 bits: 1/10 of the bytes of float32.

    ::

        def quantize(x):                                            # x: (blocks, block_size)
            limit = clip * x.square().mean(1, keepdim=True).sqrt()
            x = x.clamp(-limit, limit)
            scale = x.abs().amax(1, keepdim=True)
            is_sent = torch.rand_like(x) < x.abs() / scale
            return scale * x.sign() * is_sent                       # sent: the scales and -1, 0, 1

    Unbiased except for clipping, and has no state. The variance of a number is large if the number
    is small compared with the largest one of its block; see docs/hooks/terngrad.md.

    This is section 3.1 and equation 14. The paper's workers share one scale per layer, so that the
    server can send sums of codes, with 2·N + 1 levels. Here each block of each rank has its own
    scale, and averages are rounded once more, to 15 levels without clipping: with three levels, or
    clipped, averages would lose much more.

    Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad: Ternary Gradients to Reduce Communication in
    Distributed Deep Learning, NeurIPS 2017, https://arxiv.org/abs/1705.07878.
    """

    block_size: BlockSize = 512
    """Numbers per scale; in the paper, a layer. Smaller blocks: less variance, more
    bytes."""
    clip: Annotated[float, Limits(ge=0)] = 2.5
    """Clamp a rank's numbers to this many root mean squares of their block; 0: no clipping, and no
    bias."""

    tells_contribution = False  # see Note [Errors that do not grow] in base.py
    wire = "1/4 byte per element in an all-to-all, 1/2 in an all-gather, and 4 per block in each"
    paper = "https://arxiv.org/abs/1705.07878"

    def number_format(self) -> Format:
        return integers(2, clip=self.clip or math.inf, stochastic=True)

    def average_format(self) -> Format:
        """Return a format without clipping, which would clamp sparse averages much more."""
        return integers(4, stochastic=True)


@register_hook("natural")
@dataclass
class Natural(Quantized):
    """Average in powers of two: a quarter of the bytes of float32. Unbiased, and has no state.

    ::

        def quantize(x):                                       # x: (blocks, block_size)
            power = x.abs().log2().floor().exp2()              # the power of two at or below |x|
            is_up = torch.rand_like(x) < x.abs() / power - 1   # so that the expected value is x
            return x.sign() * power * (1 + is_up)              # sent: signs and exponents

    The error of a number is proportional to the number, whatever else is in its block; the variance
    is at most x²/8. A code has a sign and 7 bits of exponent instead of the paper's 8: the exponent
    counts from the largest number of the block. Numbers below 2^-126 times that number are rounded
    at random to it or to 0.

    Horváth, Ho, Horváth, Sahu, Canini, Richtárik: Natural Compression for Distributed Deep
    Learning, MSML 2022, https://arxiv.org/abs/1905.10988 (definition 1).
    """

    block_size: BlockSize = 512
    """Numbers per scale. It affects only the bytes."""

    wire = "1 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1905.10988"

    def number_format(self) -> Format:
        return NATURAL
