"""Threshold: each rank sends all elements of at least a given magnitude.

A step with the gradient ``g[i]`` and the error ``e[i]`` of each rank i of N::

    for i in range(N):
        m = g[i] + e[i]
        sent[i] = torch.where(m.abs() >= value, m, 0)
        e[i] = m - sent[i]
    result = sum(sent) / N    # an all-gather of counts, then one of values and indices

After Strom: Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech
2015, which sends the threshold itself. Here elements are sent unchanged: the hard threshold of Sahu
et al.: Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021,
https://arxiv.org/abs/2108.00951.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from commhooks.algorithms.sparse.base import SparseHook
from commhooks.algorithms.sparse.messages import SparseVector, gather, to_memory_dtype
from commhooks.algorithms.sparse.selection import select_above
from commhooks.comm.communicator import Communicator
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from reducer import GradBucket


@register_hook("threshold")
@dataclass
class Threshold(SparseHook):
    """Average the elements that reach a threshold; add the others to the next gradient.

    The number of elements sent follows the gradients: more early in training, fewer later. It may
    differ between ranks, and each rank sends as many bytes as the rank with the most elements, but
    no more than plain averaging in float32, and only the counts if all are zero. A non-finite
    element reaches any threshold. On CUDA the host waits for this rank's count and for those of the
    others, on which the memory needed depends.
    """

    value: Annotated[float, Limits(gt=0, lt=math.inf)] = 0.0005
    """Elements of at least this magnitude are sent; it applies to this rank's gradient plus error.
    A gradient scaler multiplies gradients, so multiply this by its scale."""

    wire = (
        "an all-gather of 8 bytes, then one of values and indices, padded to the longest, at most "
        "what plain averaging sends in float32"
    )
    paper = "https://arxiv.org/abs/2108.00951"
    rounds = 2

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        with self._error(bucket, comm) as error:
            total = to_memory_dtype(buffer)
            indices = select_above(total, error, self.value)  # also adds the error to the total
            own = SparseVector.of(total, indices, buffer.dtype)
            if comm.wants_contribution and self.tells_contribution:
                comm.contribution = own.dense(total.dtype)
            count = indices.new_full((), own.count, dtype=torch.int64)
            counts: list[int] = (await comm.all_gather(count)).tolist()
            gathered = await gather(own, counts, comm)
            return gathered.commit(total, error, buffer)
