"""The base class of hooks that quantize: they choose a format, and whether errors are fed back.

A step with error feedback, where ``quantize`` is what a hook documents::

    x = gradient + error
    error = x - quantize(x)
    y = mean_over_ranks(quantize(x)) + average_error    # all-to-all: rank j averages part j
    average_error = y - quantize(y)
    return quantize(y)                                  # all-gather

Without it both errors are zero: see two_shot.py.

Note [Errors that do not grow]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Error feedback adds the part of a gradient g that was not sent to the next gradient. If a hook
leaves out at most a share q < 1 of its input, in some norm, then the errors stay bounded:

    |e| <= q·|g + previous e|    and so    |e| <= q / (1 - q) · |g|

Otherwise they may grow in each step, even if the hook is unbiased. Codecs that round to nearest
leave out much less. Codecs with stochastic rounding may leave out more than the input: if a block
holds one number of size 1 and many of size 1/100, each of the small ones becomes 0 or, rarely, 1.
Numbers are quantized twice, first each rank's own and then their average. If each time a share c is
left out, then

    q = c + c·(1 + c) = (1 + c)² - 1    which is below 1 for c < √2 - 1
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.quantized.error_memory import ErrorMemory
from commhooks.algorithms.quantized.two_shot import average_quantized, wire_bytes
from commhooks.codecs.block import BlockCodec, BlockSize
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from commhooks.hook.state import StateField
from commhooks.kernels.block_codec import Format
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["Biased", "Quantized"]


@dataclass
class Quantized(CommHook):
    """Average quantized gradients. A subclass chooses the format and whether errors are fed back.

    Averages are summed in float32. Errors are kept in float32, or in float64 for float64 gradients.
    If a number of a bucket is not finite on any rank, then the bucket averages to NaN on all ranks
    and no error changes. On a GPU nothing synchronizes, and CuPy is required.
    """

    block_size: BlockSize = 256
    """How many numbers share a scale. Smaller blocks: closer to the average, more bytes."""
    seed: int = field(default=0, kw_only=True)
    """The seed of random numbers, which also depend on the rank, the step and the bucket."""

    # Without types, or they would be options of all hooks.
    error_feedback = False
    rotate = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._codec = self.make_codec()
        self._average_codec = BlockCodec(
            self.average_format(), self.block_size, rotated=self.rotate
        )
        self._errors = ErrorMemory()

    def number_format(self) -> Format:
        """Return the format of each rank's own numbers, as the options specify."""
        raise NotImplementedError(f"{type(self).__qualname__} has no `number_format`")

    def average_format(self) -> Format:
        """Return the format of averages."""
        return self.number_format()

    def make_codec(self) -> BlockCodec:
        """Return the codec of each rank's own numbers."""
        return BlockCodec(self.number_format(), self.block_size, rotated=self.rotate)

    @property
    def tells_contribution(self) -> bool:
        """Whether ``comm.contribution`` is set on request: not by hooks with error feedback.

        A second error feedback around them would count the errors twice. Hooks whose errors would
        grow do not set it either: see Note [Errors that do not grow].
        """
        return not self.error_feedback

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError if a device of the parameters cannot run the kernels."""
        super().prepare(parameters, group)
        for device in {parameter.device for parameter in parameters.values()}:
            self._codec.require(device)

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return self._errors.fields(gradient) if self.error_feedback else ()

    def keep_own(self, mean: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        self._errors.keep_average(mean, own)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        """Return the bytes that each of ``size`` ranks sends for ``bucket``."""
        return wire_bytes(bucket.buffer().numel(), size, self._codec, self._average_codec)

    def collectives(self, rank: int, size: int) -> dict[tuple[int, ...], int]:  # noqa: ARG002
        return {(): 2}

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Average by a two-shot all-reduce of codes, see two_shot.py."""
        buffer = bucket.buffer()
        values = buffer.to(at_least_float32(buffer.dtype))
        await average_quantized(
            values,
            comm,
            self._codec,
            self._average_codec,
            seed=f"{self.seed}:{bucket.key}",
            errors=self._errors.of(bucket, comm, self.state) if self.error_feedback else None,
            tells_contribution=comm.wants_contribution and self.tells_contribution,
        )
        return buffer if values is buffer else buffer.copy_(values)


@dataclass
class Biased(Quantized):
    """Base of hooks that are biased in each step but exact over steps: errors are sent later."""

    error_feedback: bool = True
    """Add the error of a step to the next gradient. Without it, the result is biased."""
