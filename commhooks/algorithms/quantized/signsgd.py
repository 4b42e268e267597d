"""Signs: with error feedback, or by majority vote.

Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: Compressed Optimization for Non-Convex
Problems, ICML 2018, https://arxiv.org/abs/1802.04434; Karimireddy, Rebjock, Stich, Jaggi: Error
Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019,
https://arxiv.org/abs/1901.09847.

    scale = mean |x|    code = sign(x)

    with error feedback:  decoded = code · scale;  averages of these are signed again
    by majority vote:     the sign that most ranks have · mean of their scales

with x the numbers of one block. The papers' vote has no scale, which leaves the length of a step to
the learning rate; with it the result has the size of the gradients, as that of other hooks.
"""

from dataclasses import dataclass

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs import Codec, Sign
from commhooks.codecs.block import BlockSize
from commhooks.hook.registry import register_hook

__all__ = ["SignSGD"]


@register_hook("signsgd")
@dataclass
class SignSGD(Quantized):
    """Average in signs, one bit per number: 1/25 of the bytes of float32.

    With error feedback biased in each step and exact over steps; by majority vote biased. Zeros
    have random signs, and so have numbers on which the vote is a tie.

    Its steps are shorter than the gradients, so errors are sent late. It loses much in short
    trainings with momentum, see docs/hooks/quantized.md; prefer ``onebit``.
    """

    error_feedback: bool = True
    """Add what a step did not send to the next gradient; else let ranks vote, and keep nothing."""
    block_size: BlockSize = 128
    """Numbers that share a scale. Smaller: closer to the average, more bytes."""

    wire = "1/8 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1901.09847"

    @property
    def feeds_back(self) -> bool:
        return self.error_feedback

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]
        """Never: a vote is no sum of what ranks sent."""
        return False

    def codec(self) -> Codec:
        return Sign("mean", majority=not self.error_feedback, block_size=self.block_size)
