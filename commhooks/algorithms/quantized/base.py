"""What hooks that send codes of a few bits have in common.

Note [Errors that do not grow]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Error feedback adds to a gradient g what was left out of the last one. If of whatever it is given a
hook leaves out no more than a share q < 1, in some norm, these errors stay bounded:

    |e| <= q·|g + old e|    hence    |e| <= q / (1 - q) · |g|

and else they may grow in each step, though the hook be unbiased. Codecs that round to nearest are
far from that. Those that round at random may leave out more than all: one number of size 1 among
many of size 1/100 makes of each of these a 0 or, now and then, a 1. As numbers are rounded twice, a
rank's own and their average, with a share c left out of each time what counts is

    q = c + c·(1 + c) = (1 + c)² - 1    below 1 for c below √2 - 1
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.quantized.error_memory import ErrorMemory
from commhooks.algorithms.quantized.two_shot import average_encoded, wire_bytes
from commhooks.codecs import Codec
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["Quantized"]


@dataclass
class Quantized(CommHook):
    """Average codes. A subclass says which codec, and whether errors are fed back.

    Averages are summed in float32 and errors kept in it, or in float64 for float64 gradients. A
    bucket with a number that is not finite, on any rank, averages to NaN on all ranks and leaves
    all errors as they were. On a GPU nothing synchronizes, and CuPy is needed.
    """

    seed: int = field(default=0, kw_only=True)
    """Of random numbers, which also depend on rank, step and bucket."""

    _codec: Codec = field(init=False, repr=False, compare=False)
    _average_codec: Codec = field(init=False, repr=False, compare=False)
    _errors: ErrorMemory = field(default_factory=ErrorMemory, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._codec = self.codec()
        self._average_codec = self.average_codec()

    def codec(self) -> Codec:
        """What turns numbers into codes, as the options say."""
        raise NotImplementedError(f"{type(self).__qualname__} has no `codec`")

    def average_codec(self) -> Codec:
        """What turns averages into codes."""
        return self._codec

    @property
    def feeds_back(self) -> bool:
        """Whether what a step has not sent is added to the next. Without, there is no state."""
        return False

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]
        """Not with errors of its own: another error feedback would count them twice.

        Nor should hooks whose errors grow if fed back: see Note [Errors that do not grow].
        """
        return not self.feeds_back

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raises CommHookError if the kernels for the parameters' devices cannot run."""
        super().prepare(parameters, group)
        for device in {parameter.device for parameter in parameters.values()}:
            self._codec.require(device)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        """What each of ``size`` ranks sends for ``bucket``."""
        return wire_bytes(bucket.buffer().numel(), size, self._codec, self._average_codec)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        values = buffer.to(at_least_float32(buffer.dtype))
        feedback = self._errors.of(bucket, comm, self.state) if self.feeds_back else None
        await average_encoded(
            values,
            comm,
            self._codec,
            self._average_codec,
            seed=f"{self.seed}:{bucket.key}",
            feedback=feedback,
            tells_contribution=comm.wants_contribution and self.tells_contribution,
        )
        return buffer if values is buffer else buffer.copy_(values)
