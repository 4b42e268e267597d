"""Random-k: all ranks send the same k random elements of a bucket, so no index is sent.

A step with the gradient ``g[i]`` of each rank i of N, of n elements. With error feedback::

    indices = torch.randperm(n)[:k]    # the same on all ranks
    result = torch.zeros(n)
    for i in range(N):
        m = g[i] + e[i]
        result[indices] += m[indices] / N    # an all-reduce of k values
        e[i] = m.index_fill(0, indices, 0)

Without it, ``m = g[i]``, and what is sent is multiplied by n / k, so that the mean of the result
over all choices is the mean gradient.

Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018,
https://arxiv.org/abs/1809.07599 (with error feedback); Wangni, Wang, Liu, Zhang: Gradient
Sparsification for Communication-Efficient Distributed Optimization, NeurIPS 2018,
https://arxiv.org/abs/1710.09854 (without, unbiased).
"""

from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from commhooks.algorithms.sparse.base import SparseHook
from commhooks.algorithms.sparse.messages import to_memory_dtype
from commhooks.algorithms.sparse.selection import add_and_check, draw_indices, elements_to_send
from commhooks.algorithms.sparse.shared_topk import average_at
from commhooks.codecs.finite import poison
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from commhooks.precision import saturating_cast
from reducer import GradBucket


@register_hook("randomk")
@dataclass
class RandomK(SparseHook):
    """Average a random choice of each bucket's elements, the same on all ranks.

    Without error feedback the elements sent are multiplied by n/k. This makes the result unbiased
    and its second moment n/k times as large. With error feedback they are sent unchanged, and the
    others are added to the next gradient: the result is biased, and consists of sums of the
    gradients of about n/k steps.

    SGD with momentum diverges or learns less with either form at the learning rate of plain
    averaging; AdamW works with the unbiased form. See docs/hooks/randomk.md.
    """

    density: Annotated[float, Limits(gt=0, le=1)] = 0.25
    """k as a share of the bucket's elements. At least one element is sent."""
    error_feedback: bool = field(default=False, kw_only=True)
    """Add what a step does not send to the next gradient, instead of multiplying what is sent by
    n/k. The hook never tells its contribution, so ``error_feedback`` cannot wrap it: around the
    unbiased form, error feedback does not converge."""
    seed: int = 0
    """Seed of the choice, which also depends on the step and the bucket. The same on all ranks."""

    tells_contribution = False
    wire = "one all-reduce of k elements"
    paper = "https://arxiv.org/abs/1809.07599"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        with self._error(bucket, comm) as error:
            total = to_memory_dtype(buffer)
            is_damaged = add_and_check(total, error)
            n, k = buffer.numel(), self._k(bucket)
            indices = draw_indices(n, k, comm.generator, like=buffer)
            own = total.index_select(0, indices) / comm.size
            if error is None:
                own = (own * (n / max(1, k))).to(buffer.dtype)
            else:
                # The sum of all ranks has to fit too; the factor 2 leaves room for rounding up.
                own = saturating_cast(own, buffer.dtype, headroom=2 * comm.size)
            poison(own, is_damaged)
            return await average_at(
                indices, own, total=total, error=error, buffer=buffer, comm=comm
            )

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        return all_reduce_bytes(self._k(bucket) * bucket.buffer().dtype.itemsize, size)

    def _k(self, bucket: GradBucket) -> int:
        return elements_to_send(self.density, bucket.buffer().numel())
