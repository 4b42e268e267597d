"""qsgd: QSGD, a few levels with unbiased stochastic rounding.

::

    def quantize(x):                                            # x: (blocks, block_size)
        scale = x.abs().amax(1, keepdim=True) / levels          # norm="max"
        scale = x.norm(dim=1, keepdim=True) / levels            # norm="l2"
        return scale * (x / scale + torch.rand_like(x)).floor() # sent: the scales and integers

    y = mean_over_ranks(quantize(gradient))                     # all-to-all: rank j averages part j
    return quantize(y)                                          # all-gather

This is section 3.1, equation 3. Codes have a fixed width of 2, 4 or 8 bits, the smallest that holds
all levels, instead of the paper's Elias code. That takes a single pass, and all ranks know the
length of a message beforehand.

Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization
and Encoding, NeurIPS 2017, https://arxiv.org/abs/1610.02132.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.levels import LevelCodec
from commhooks.hook.options import Ge, Le
from commhooks.hook.registry import register_hook

__all__ = ["QSGD"]


@register_hook("qsgd")
@dataclass
class QSGD(Quantized):
    """Average in a few levels with stochastic rounding. Unbiased, and has no state.

    With few levels it leaves out too much for ``error_feedback``, which then raises an error: with
    fewer than 3, or with the norm "l2" fewer than about 0.8·√block_size.
    """

    levels: Annotated[int, Ge(1), Le(127)] = 7
    """The number of levels above zero; there are as many below. One level takes 2 bits per number,
    2 to 7 take 4 bits, and more take 8."""
    norm: Literal["max", "l2"] = "max"
    """The norm of a block: its largest magnitude, as in the paper's experiments, or its Euclidean
    norm, as in the paper's analysis, which sends more zeros and has a larger variance."""
    block_size: BlockSize = 128
    """How many numbers share a scale; the paper calls it the bucket size and takes 512. Smaller
    blocks: less variance, more bytes."""

    wire = "2, 4 or 8 bits per element and 4 bytes per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1610.02132"

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]
        """Whether there are enough levels for Note [Errors that do not grow], see base.py.

        Rounding changes a number by at most scale = max |x| / levels. The expected square of the
        change is at most scale² / 4, summed over B numbers at most ‖x‖²·B / (4·levels²).
        """
        share = 1 / self.levels if self.norm == "max" else self.block_size / (4 * self.levels**2)
        return (1 + share) ** 2 < 2

    def make_codec(self) -> BlockCodec:
        bits = next(bits for bits in (2, 4, 8) if self.levels < 2 ** (bits - 1))
        return LevelCodec(
            bits, self.levels, norm=self.norm, stochastic=True, block_size=self.block_size
        )
