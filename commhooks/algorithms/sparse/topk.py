"""Top-k: each rank sends the largest elements of a bucket and keeps the others for later steps.

A step with the gradient ``g[i]`` and the error ``e[i]`` of each rank i of N::

    for i in range(N):
        m = g[i] + e[i]
        indices = m.abs().topk(k).indices
        sent[i] = torch.zeros_like(m).index_copy(0, indices, m[indices])
        e[i] = m - sent[i]
    result = sum(sent) / N    # an all-gather of values and indices

Aji, Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP 2017,
https://arxiv.org/abs/1704.05021; Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS
2018, https://arxiv.org/abs/1809.07599.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from commhooks.algorithms.sparse.base import (
    SparseHook,
    SparseVector,
    gather,
    gather_bytes,
    to_memory_dtype,
)
from commhooks.algorithms.sparse.selection import density_at, kept_elements, select_largest
from commhooks.comm.communicator import Communicator
from commhooks.hook.options import Ge, Gt, Le
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from reducer import GradBucket

__all__ = ["TopK"]


@register_hook("topk")
@dataclass
class TopK(SparseHook):
    """Average the largest elements of each rank's bucket; add the others to the next gradient.

    The largest elements are selected from the whole bucket, not per parameter. This leaves the
    smallest error for the bytes sent, and parameters with small gradients are sent once their error
    has grown. At least one element of each bucket is sent.

    Wire, per bucket and step: one all-gather of k values in the bucket's dtype and their indices of
    about 2 + log2(1/density) bits each. Memory: the error, as large as the gradients, in float32
    (float64 for float64 gradients).

    If an element of a bucket is not finite on any rank, the bucket averages to NaN on all ranks and
    the error does not change. See Note [Sparse commit] in algorithms/sparse/base.py.
    """

    error_feedback: bool = field(default=True, kw_only=True)
    """Add what a step does not send to the next gradient. Otherwise small elements are lost."""
    density: Annotated[float, Gt(0), Le(1)] = 0.01
    """k as a share of the bucket's elements, after the warm-up."""
    warmup_steps: Annotated[int, Ge(0)] = 200
    """Number of steps in which the density decreases exponentially from ``warmup_density``. What is
    not sent in early steps is out of date when it is sent."""
    warmup_density: Annotated[float, Gt(0), Le(1)] = 1.0
    """Density of the first step, unless ``density`` is higher."""

    wire = "one all-gather of k values and their indices of about 2 + log2(1/density) bits"
    paper = "https://arxiv.org/abs/1809.07599"

    @property
    def tells_contribution(self) -> bool:  # type: ignore[override]  # depends on options
        """Whether the hook keeps no error: another error feedback would count it twice."""
        return not self.error_feedback

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return super().state_fields(gradient) if self.error_feedback else ()

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        error = self._errors.of(bucket, self.state) if self.error_feedback else None
        total = to_memory_dtype(buffer)
        k = self._k(bucket)
        indices = select_largest(total, error, k)  # also adds the error to the total
        own = SparseVector.of(total, indices, buffer.dtype)
        if comm.wants_contribution and self.tells_contribution:
            comm.contribution = own.dense(total.dtype)
        gathered = await gather(own, [k] * comm.size, comm)
        return gathered.commit(total, error, buffer)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        return gather_bytes(bucket, self._k(bucket), size)

    def _k(self, bucket: GradBucket) -> int:
        density = density_at(
            bucket.step,
            density=self.density,
            warmup_steps=self.warmup_steps,
            warmup_density=self.warmup_density,
        )
        return kept_elements(density, bucket.buffer().numel())
