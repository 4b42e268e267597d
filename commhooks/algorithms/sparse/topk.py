"""Top-k: each rank sends the largest numbers of a bucket, and keeps the rest for later.

Aji, Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP 2017,
https://arxiv.org/abs/1704.05021; Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS
2018, https://arxiv.org/abs/1809.07599.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from commhooks.algorithms.sparse.base import SparseHook
from commhooks.algorithms.sparse.density import Density
from commhooks.algorithms.sparse.part import SparsePart, gather_bytes, kept_elements
from commhooks.algorithms.sparse.selection import select_largest
from commhooks.comm.communicator import Communicator
from commhooks.hook.options import Ge, Gt, Le
from commhooks.hook.registry import register_hook
from reducer import GradBucket

__all__ = ["TopK"]


@register_hook("topk")
@dataclass
class TopK(SparseHook):
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
    """k, as a share of the bucket's elements, after the warm-up."""
    warmup_steps: Annotated[int, Ge(0)] = 200
    """Steps in which the density falls exponentially, from ``warmup_density``: what is held back in
    early steps is out of date when it is sent."""
    warmup_density: Annotated[float, Gt(0), Le(1)] = 1.0
    """The density of the first step, unless ``density`` is higher."""

    wire = "one all-gather of k values and their indices of about 2 + log2(1/density) bits"
    paper = "https://arxiv.org/abs/1809.07599"

    def select(self, gradient: Tensor, error: Tensor | None, step: int) -> Tensor:
        count = kept_elements(self._density.at(step), gradient.numel())
        return select_largest(gradient, error, count)

    async def counts(self, own: SparsePart, comm: Communicator) -> list[int]:
        return [own.count] * comm.size

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        return gather_bytes(bucket, self._density.at(bucket.step), size)

    @property
    def _density(self) -> Density:
        return Density(self.density, self.warmup_density, self.warmup_steps)
