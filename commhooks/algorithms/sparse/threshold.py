"""Each rank sends the numbers that reach a threshold, however many these are.

After Strom: Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech
2015, who sends the threshold itself; here numbers are sent as they are, which is the hard threshold
of Sahu et al.: Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021,
https://arxiv.org/abs/2108.00951.

What is not finite reaches any threshold, so Note [Sparse commit] holds.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from commhooks.algorithms.sparse.base import SparseHook
from commhooks.algorithms.sparse.part import SparsePart
from commhooks.algorithms.sparse.selection import select_above
from commhooks.comm.communicator import Communicator
from commhooks.hook.options import Gt, Lt
from commhooks.hook.registry import register_hook

__all__ = ["Threshold"]


@register_hook("threshold")
@dataclass
class Threshold(SparseHook):
    """Average the numbers that reach a threshold; what is not sent is added next time.

    How much is sent follows the gradients: more early in training, less later. Ranks may send
    different amounts, and pay for the largest.

    Wire, per bucket and step: an all-gather of the counts, 8 bytes from each rank; then, unless all
    are zero, one of values in the bucket's dtype and their indices, padded to those of the rank
    with the most. Memory: the errors, as in ``topk``. On CUDA the host
    waits for this rank's count and for those of the others: they decide how much memory is needed.

    A bucket with a number that is not finite, on any rank, averages to NaN on all ranks and leaves
    the errors as they were.
    """

    value: Annotated[float, Gt(0), Lt(math.inf)] = 0.0005
    """Numbers of this magnitude or more are sent, of gradient plus error as they are on the rank. A
    gradient scaler multiplies gradients, so multiply this with its scale."""

    wire = "an all-gather of 8 bytes, then one of values and indices, padded to the longest"
    paper = "https://arxiv.org/abs/2108.00951"

    def select(self, gradient: Tensor, error: Tensor | None, step: int) -> Tensor:  # noqa: ARG002
        return select_above(gradient, error, self.value)

    async def counts(self, own: SparsePart, comm: Communicator) -> list[int]:
        count = own.indices.new_full((), own.count, dtype=torch.int64)
        counts: list[int] = (await comm.all_gather(count)).tolist()
        return counts
