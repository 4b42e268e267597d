"""signsgd: signs, with error feedback (EF-signSGD) or by majority vote (signSGD).

::

    def quantize(x):                                       # x: (blocks, block_size)
        scale = x.abs().mean(1, keepdim=True)
        return scale * x.sign()                            # sent: the scales and the signs

    x = gradient + error
    error = x - quantize(x)
    y = mean_over_ranks(quantize(x)) + average_error       # all-to-all: rank j averages part j
    average_error = y - quantize(y)
    return quantize(y)                                     # all-gather

By majority vote there are no errors, and y = sign(sum of the ranks' signs) · mean of their scales.
The papers' vote has no scale, and leaves the length of a step to the learning rate. With the scale
the result has the size of the gradients, as that of other hooks.

Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: Compressed Optimization for Non-Convex
Problems, ICML 2018, https://arxiv.org/abs/1802.04434; Karimireddy, Rebjock, Stich, Jaggi: Error
Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019,
https://arxiv.org/abs/1901.09847.
"""

from dataclasses import dataclass

from commhooks.algorithms.quantized.base import Quantized
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.codecs.sign import SignCodec
from commhooks.hook.registry import register_hook

__all__ = ["SignSGD"]


@register_hook("signsgd")
@dataclass
class SignSGD(Quantized):
    """Average in signs, one bit per number: 1/25 of the bytes of float32.

    With error feedback it is biased in each step and exact over steps; by majority vote it is
    biased. Zeros get random signs, and so do numbers on which the vote is a tie.

    Its steps are shorter than the gradients, so errors are sent late. It loses much in short
    trainings with momentum, see docs/hooks/signsgd.md; prefer ``onebit``.
    """

    error_feedback: bool = True
    """Add the error of a step to the next gradient; otherwise let the ranks vote, without state."""
    block_size: BlockSize = 128
    """How many numbers share a scale. Smaller blocks: closer to the average, more bytes."""

    wire = "1/8 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1901.09847"

    @property
    def uses_error_feedback(self) -> bool:
        return self.error_feedback

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]
        """False: the result of a vote is not a sum of what the ranks sent."""
        return False

    def make_codec(self) -> BlockCodec:
        return SignCodec("mean", majority=not self.error_feedback, block_size=self.block_size)
