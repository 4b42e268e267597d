"""What hooks that send codes of a few bits have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.error_memory import ErrorMemory
from commhooks.codecs import Codec
from commhooks.communicator import Communicator
from commhooks.hook import CommHook
from commhooks.transport import average_encoded, wire_bytes
from reducer import GradBucket

__all__ = ["Quantised"]


@dataclass
class Quantised(CommHook):
    """Average codes. A subclass says which codec, and whether errors are fed back.

    Averages are summed in float32 and errors kept in it, or in float64 for float64 gradients. A
    bucket with a number that is not finite, on any rank, averages to NaN on all ranks and leaves
    all errors as they were. On a GPU nothing synchronises, and CuPy is needed.
    """

    seed: int = field(default=0, kw_only=True)
    """Of random numbers, which also depend on rank, step and bucket."""

    _codec: Codec = field(init=False, repr=False, compare=False)
    _errors: ErrorMemory = field(default_factory=ErrorMemory, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._codec = self.codec()

    def codec(self) -> Codec:
        """What turns numbers into codes, as the options say."""
        raise NotImplementedError(f"{type(self).__qualname__} has no `codec`")

    @property
    def feeds_back(self) -> bool:
        """Whether what a step has not sent is added to the next. Without, there is no state."""
        return False

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]
        """Not with errors of its own: another error feedback would count them twice."""
        return not self.feeds_back

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raises CommHookError if the kernels for the parameters' devices cannot run."""
        super().prepare(parameters, group)
        for device in {parameter.device for parameter in parameters.values()}:
            self._codec.require(device)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        """What each of ``size`` ranks sends for ``bucket``."""
        return wire_bytes(bucket.buffer().numel(), size, self._codec)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        values = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
        feedback = self._errors.of(bucket, comm, self.state) if self.feeds_back else None
        await average_encoded(
            values,
            comm,
            self._codec,
            seed=f"{self.seed}:{bucket.key}",
            feedback=feedback,
            tells_contribution=comm.wants_contribution and self.tells_contribution,
        )
        return buffer if values is buffer else buffer.copy_(values)
