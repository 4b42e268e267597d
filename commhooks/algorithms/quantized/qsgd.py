"""QSGD: a few levels, rounded at random such that the mean is exact.

Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization
and Encoding, NeurIPS 2017, https://arxiv.org/abs/1610.02132.

    scale = ‖x‖ / s    code = x / scale, rounded up or down at random    decoded = code · scale

with s levels and x the numbers of one block (section 3.1, equation 3). Codes have a fixed width of
2, 4 or 8 bits here, whichever holds them, instead of the paper's Elias code: one pass, and a length
that all ranks know beforehand.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs import Codec, Levels
from commhooks.codecs.block import BlockSize
from commhooks.hook.options.constraints import Ge, Le
from commhooks.hook.registry import register_hook

__all__ = ["QSGD"]


@register_hook("qsgd")
@dataclass
class QSGD(Quantized):
    """Average in a few levels that are rounded at random. Unbiased, and without a memory.

    With few levels it leaves out too much for ``error_feedback``, which refuses it: fewer than 3,
    or, with the norm "l2", about 0.8·√block_size.
    """

    levels: Annotated[int, Ge(1), Le(127)] = 7
    """s, above zero; as many below. 1 takes 2 bits per number, 2 to 7 take 4, more take 8."""
    norm: Literal["max", "l2"] = "max"
    """Of a block: its largest number, as in the paper's experiments, or its Euclidean norm, as in
    the paper's analysis, which sends more zeros and varies more."""
    block_size: BlockSize = 128
    """Numbers that share a scale, the paper's bucket, which has 512 there. Smaller: less variance,
    more bytes."""

    wire = "2, 4 or 8 bits per element and 4 bytes per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1610.02132"

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]
        """With enough levels: see Note [Errors that do not grow] in algorithms/quantized/base.py.

        Rounding changes no number by more than scale = max |x| / s, and the expected square of
        what it changes one by is scale² / 4 at most: summed over B numbers, ‖x‖²·B / (4·s²).
        """
        share = 1 / self.levels if self.norm == "max" else self.block_size / (4 * self.levels**2)
        return (1 + share) ** 2 < 2

    def codec(self) -> Codec:
        bits = next(bits for bits in (2, 4, 8) if self.levels < 2 ** (bits - 1))
        return Levels(
            bits, self.levels, norm=self.norm, stochastic=True, block_size=self.block_size
        )
