"""What top-k and threshold have in common: each rank sends some numbers and keeps the others.

Note [Sparse commit]
~~~~~~~~~~~~~~~~~~~~
With G the gradients, E what earlier steps left, and M = G + E:

    rank i:    S_i = some of M_i, the largest       sent: S_i
    all:       result = mean of S_i
    rank i:    E_i = M_i - S_i

M is made in the bucket's buffer; E changes only when the parts of all ranks are there and finite.
What is not finite counts as larger than any number, so it is always among what is sent: no flag
needs to travel for all ranks to learn of it. They then return NaN, and keep E bit for bit: see Note
[All finite] in codecs/finite.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.sparse.gathered_parts import gather
from commhooks.algorithms.sparse.part import SparsePart, to_memory_dtype
from commhooks.algorithms.sparse.selection import require_kernels
from commhooks.codecs.finite import is_known_false
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from reducer import GradBucket

__all__ = ["SparseHook"]


@dataclass
class SparseHook(CommHook):
    """Average the largest numbers of each rank's bucket. Subclasses say which these are."""

    error_feedback: bool = field(default=True, kw_only=True)
    """Add what a step did not send to the next gradient. Without, small numbers are lost."""

    _errors: BucketMemory = field(
        default_factory=lambda: BucketMemory("error"), init=False, repr=False, compare=False
    )

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]  # depends on options
        """Not with errors of its own: another error feedback would count them twice."""
        return not self.error_feedback

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Refuses parameters on a GPU without CuPy."""
        require_kernels(parameters)
        super().prepare(parameters, group)

    def select(self, gradient: Tensor, error: Tensor | None, step: int) -> Tensor:
        """Adds ``error`` to ``gradient``; the indices of what is sent, int32, ascending."""
        raise NotImplementedError(f"{type(self).__qualname__} has no `select`")

    async def counts(self, own: SparsePart, comm: Communicator) -> Sequence[int]:
        """How many numbers each rank sends."""
        raise NotImplementedError(f"{type(self).__qualname__} has no `async def counts`")

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        """See Note [Sparse commit]."""
        buffer = bucket.buffer()
        error = self._errors.of(bucket, self.state) if self.error_feedback else None
        total = to_memory_dtype(buffer)
        own = SparsePart.of(total, self.select(total, error, bucket.step), buffer.dtype)
        if comm.wants_contribution and self.tells_contribution:
            comm.contribution = own.dense(total)
        counts = await self.counts(own, comm)
        parts = await gather(own, counts, buffer.numel(), comm)
        if is_known_false(parts.verdict):
            return buffer.fill_(torch.nan)
        if error is None:
            return parts.store_mean(buffer)
        return parts.end(own, total, error, buffer)
