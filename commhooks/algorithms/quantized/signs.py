"""onebit and signsgd: one bit per number, with error feedback or by majority vote."""

from dataclasses import dataclass, field

from commhooks.algorithms.bucket_memory import ErrorDtype
from commhooks.algorithms.quantized.base import Quantized, QuantizedWithFeedback
from commhooks.codecs.block import BlockSize
from commhooks.codecs.formats import Format, signs
from commhooks.hook.registry import register_hook


@register_hook("onebit")
@dataclass
class OneBit(Quantized):
    """Average in one bit per number, with the norm of the gradient: 1/25 of the bytes of float32.

    ::

        def quantize(x):                                   # x: (blocks, block_size)
            scale = x.square().mean(1, keepdim=True).sqrt()
            return scale * x.sign()                        # sent: the scales and the signs

    Biased in each step but exact over steps, because errors are sent later. It always uses error
    feedback, and should start with exact averages, as in the paper: put it into ``schedule``.
    docs/hooks/onebit.md tells what is lost with and without such a start.

    This is only the averaging of 1-bit Adam. The paper also freezes Adam's variance after a
    warm-up, which is the optimizer's task.

    Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He: 1-bit Adam: Communication Efficient
    Large-Scale Training with Adam's Convergence Speed, ICML 2021, https://arxiv.org/abs/2102.02888
    (section 3).
    """

    block_size: BlockSize = 128
    """Numbers per scale. Smaller blocks: closer to the average, more bytes. Larger
    blocks mix parameters whose gradients differ much in size."""

    error_dtype: ErrorDtype = field(default=None, kw_only=True)
    """None keeps errors in float32 (float64 for float64 gradients). bfloat16, rounded
    stochastically, halves their memory."""

    error_feedback = True
    wire = "1/8 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/2102.02888"

    def number_format(self) -> Format:
        return signs("root_mean")


@register_hook("signsgd")
@dataclass
class SignSGD(QuantizedWithFeedback):
    """Average in signs, one bit per number: 1/25 of the bytes of float32.

    ::

        def quantize(x):                                   # x: (blocks, block_size)
            scale = x.abs().mean(1, keepdim=True)
            return scale * x.sign()                        # sent: the scales and the signs

    With error feedback (EF-signSGD) it is biased in each step and exact over steps. By majority
    vote (signSGD) it is biased, there are no errors, and y = sign(sum of the ranks' signs) · mean
    of their scales · share of the block without a tie, which is about half with 2 unrelated ranks.
    The papers' vote has no scale, and leaves the length of a step to the learning rate. Zeros get
    random signs, and so do numbers on which the vote is a tie.

    Its steps are shorter than the gradients, so errors are sent late. It loses much in short
    trainings with momentum, see docs/hooks/signsgd.md; prefer ``onebit``.

    Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: Compressed Optimization for Non-Convex
    Problems, ICML 2018, https://arxiv.org/abs/1802.04434; Karimireddy, Rebjock, Stich, Jaggi: Error
    Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019,
    https://arxiv.org/abs/1901.09847.
    """

    block_size: BlockSize = 128
    error_feedback: bool = True
    """Add the error of a step to the next gradient; otherwise let the ranks vote, without state."""

    @property
    def capturable_from(self) -> int | None:
        # Errors take back the random signs of zeros; a vote needs others in each step.
        return super().capturable_from if self.error_feedback else None

    tells_contribution = False  # the result of a vote is not a sum of what the ranks sent
    wire = "1/8 byte per element and 4 per block, in an all-to-all and an all-gather"
    paper = "https://arxiv.org/abs/1901.09847"

    def number_format(self) -> Format:
        return signs("mean", majority=not self.error_feedback)
