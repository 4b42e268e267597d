"""Top-k: each rank sends the largest numbers of a bucket, and keeps the rest for later.

Aji, Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP 2017,
https://arxiv.org/abs/1704.05021; Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS
2018, https://arxiv.org/abs/1809.07599.

Note [Sparse commit]
~~~~~~~~~~~~~~~~~~~~
With G the gradients, E what earlier steps left, and M = G + E:

    rank i:    S_i = the k largest of M_i       sent: S_i
    all:       result = mean of S_i
    rank i:    E_i = M_i - S_i

M is made in the bucket's buffer; E changes only when the parts of all ranks are there and finite.
What is not finite is larger than any number, so it is among the k largest: no flag needs to travel
for all ranks to learn of it. They then return NaN, and keep their state bit for bit.
"""

from dataclasses import dataclass, field
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.sparse import select_largest
from commhooks.algorithms.sparse_part import (
    SparsePart,
    are_finite,
    gather,
    store_mean,
    to_memory_dtype,
)
from commhooks.communicator import Communicator
from commhooks.hook import CommHook
from commhooks.registry import register_hook
from reducer import GradBucket

__all__ = ["TopK", "kept_elements"]


def kept_elements(density: float, numel: int) -> int:
    """How many of a bucket's elements are sent: the nearest integer, but at least one."""
    return max(1, round(density * numel))


@register_hook("topk")
@dataclass
class TopK(CommHook):
    """Average the largest numbers of each rank's bucket; what is not sent is added next time.

    The largest are chosen out of the whole bucket, not parameter by parameter: that is what leaves
    the smallest error for the bytes, and a parameter with small gradients gets its turn through its
    error. At least one number of each bucket is sent.

    Wire, per bucket and step: one all-gather of k values in the bucket's dtype and their indices,
    about 2 + log2(1/density) bits each. Memory: the errors, as large as the gradients, in float32
    (float64 for float64 gradients).

    A bucket with a number that is not finite, on any rank, averages to NaN on all ranks and leaves
    the errors as they were. See Note [Sparse commit].
    """

    density: Annotated[float, Gt(0), Le(1)] = 0.01
    """k, as a share of the bucket's elements."""
    error_feedback: bool = True
    """Add what a step did not send to the next gradient. Without, the result is biased for good."""

    _errors: BucketMemory = field(
        default_factory=lambda: BucketMemory("error"), init=False, repr=False, compare=False
    )

    wire = "one all-gather of k values and their indices of about 2 + log2(1/density) bits"
    paper = "https://arxiv.org/abs/1809.07599"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        if (numel := buffer.numel()) == 0:
            return buffer
        error = self._errors.of(bucket, self.state) if self.error_feedback else None
        total = to_memory_dtype(buffer)
        count = kept_elements(self.density, numel)
        own = SparsePart.of(total, select_largest(total, error, count), buffer.dtype)
        parts = await gather(own, [count] * comm.size, numel, comm)
        if not are_finite(parts):
            return buffer.fill_(torch.nan)
        if error is not None:
            own.leave(total, error)
        if comm.wants_contribution:
            comm.contribution = own.dense(total)
        return store_mean(parts, buffer)
