"""Random-k: all ranks send the same few numbers, chosen at random, so that no index travels.

Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018,
https://arxiv.org/abs/1809.07599 (with error feedback); Wangni, Wang, Liu, Zhang: Gradient
Sparsification for Communication-Efficient Distributed Optimization, NeurIPS 2018,
https://arxiv.org/abs/1710.09854 (without, unbiased).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.sparse.part import kept_elements, to_memory_dtype
from commhooks.algorithms.sparse.selection import (
    add_and_check,
    draw_indices,
    require_kernels,
    scatter_add,
)
from commhooks.codecs.finite import copy_if, is_known_false, nan_unless
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.base import CommHook
from commhooks.hook.options import Gt, Le
from commhooks.hook.registry import register_hook
from commhooks.precision import fit
from reducer import GradBucket

__all__ = ["RandomK"]


@register_hook("randomk")
@dataclass
class RandomK(CommHook):
    """Average a random choice of each bucket's numbers, the same on all ranks.

    What is sent is multiplied by n/k, which makes the result unbiased, with n/k times the second
    moment. With error feedback it is sent as it is, and what is not sent is added next time: the
    result is biased, and consists of sums of the gradients of some n/k steps.

    SGD with momentum does not bear either at the learning rate of plain averaging, AdamW bears the
    unbiased form; see docs/hooks/sparse.md.

    Wire, per bucket and step: one all-reduce of k + 1 numbers in the bucket's dtype. The additional
    one says whether all gradients are finite. Memory: with error feedback, the errors, as large
    as the gradients, in float32 (float64 for float64 gradients).

    A bucket with a number that is not finite, on any rank, sent or not, averages to NaN on all
    ranks and leaves the errors as they were.
    """

    density: Annotated[float, Gt(0), Le(1)] = 0.25
    """k, as a share of the bucket's elements. At least one is sent."""
    error_feedback: bool = False
    """Add what a step did not send to the next gradient, instead of multiplying what is sent. There
    can be no other error feedback around this hook: around an unbiased form it does not converge,
    so the contribution is not told."""
    seed: int = 0
    """Of the choice, which also depends on the step and the bucket. All ranks need the same."""

    _errors: BucketMemory = field(
        default_factory=lambda: BucketMemory("error"), init=False, repr=False, compare=False
    )

    wire = "one all-reduce of k + 1 elements"
    paper = "https://arxiv.org/abs/1809.07599"

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Refuses parameters on a GPU without CuPy."""
        require_kernels(parameters)
        super().prepare(parameters, group)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        error = self._errors.of(bucket, self.state) if self.error_feedback else None
        total = to_memory_dtype(buffer)
        flag = add_and_check(total, error)
        numel = buffer.numel()
        count = kept_elements(self.density, numel)
        indices = draw_indices(numel, count, comm.generator, like=buffer)
        own = total.index_select(0, indices) / comm.size
        if error is None:
            own = (own * (numel / max(1, count))).to(buffer.dtype)
        else:
            own = fit(own, buffer.dtype, share=2 * comm.size)  # half, for what is rounded up
        mean = await comm.all_reduce(torch.cat([own, flag.to(own.dtype)]))
        verdict = mean.isfinite().all()
        if is_known_false(verdict):
            return buffer.fill_(torch.nan)
        if error is not None:
            scatter_add(own.to(error.dtype) * -comm.size, indices, total)
            copy_if(verdict, total, error)
        buffer.fill_(nan_unless(verdict, buffer.new_zeros(())))
        return buffer.index_copy_(0, indices.long(), nan_unless(verdict, mean[:-1]))

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        buffer = bucket.buffer()
        elements = kept_elements(self.density, buffer.numel()) + 1
        return all_reduce_bytes(elements * buffer.dtype.itemsize, size)
