"""Decoupled momentum: each rank sends the strongest frequencies of its momentum, keeps the rest.

A step with the gradient ``g[i]`` and the momentum ``m[i]`` of each rank i of N, where ``dct`` and
``idct`` transform tiles (tiles.py) and ``top`` keeps the k largest coefficients of each::

    for i in range(N):
        m[i] = decay * m[i] + g[i]
        q[i] = top(dct(m[i]))
        m[i] = m[i] - idct(q[i])
    result = idct(sum(q) / N)    # an all-gather of values and indices
    # with sign=True: result = result.sign()

Peng, Chen, Su, Quesnelle, Kingma, Liu: DeMo: Decoupled Momentum Optimization, ICLR 2026,
https://arxiv.org/abs/2411.19870.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.sparse.base import (
    SparseHook,
    SparseVector,
    gather,
    gather_bytes,
    to_memory_dtype,
)
from commhooks.algorithms.sparse.selection import kept_elements, select_largest_of_chunks
from commhooks.algorithms.sparse.tiles import from_frequencies, to_frequencies
from commhooks.codecs.finite import copy_if, is_known_false
from commhooks.comm.communicator import Communicator
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.options import Ge, Gt, Le
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from reducer import GradBucket

__all__ = ["DeMo"]


@register_hook("demo")
@dataclass
class DeMo(SparseHook):
    """Average the strongest frequencies of each rank's momentum; the rest stays in the momentum.

    The hook has the momentum: **use plain SGD**, without momentum. Because what is sent leaves the
    momentum, the results of all steps add up to about the sum of the gradients, as with SGD without
    momentum: the learning rate is 1 / (1 - m) times that of SGD with momentum m.

    Momenta are transformed in tiles of matrices, as in the paper, and k coefficients are sent of
    each ``tile * tile``. The average is over all ranks, also for frequencies that only some sent.

    Wire, per bucket and step: one all-gather of k values in the bucket's dtype and their indices of
    about 2 + log2(1/density) bits each. Memory: the momentum, as large as the gradients, in float32
    (float64 for float64 gradients), and during a step four more copies of a bucket.

    If an element of a bucket is not finite on any rank, the bucket averages to NaN on all ranks and
    the momentum does not change. Results are the same bits on all ranks if these compute products
    of matrices with the same bits: on CPUs or GPUs of one kind, with one version of torch.
    """

    density: Annotated[float, Gt(0), Le(1)] = 1 / 128
    """k as a share of the coefficients of a tile: 32 of 4096."""
    decay: Annotated[float, Ge(0), Le(1)] = 0.999
    """What a step leaves of the momentum."""
    tile: Annotated[int, Ge(1), Le(256)] = 64
    """The largest side of a tile."""
    sign: bool = False
    """Return the signs of the result, as the paper does. The learning rate is then that of Adam.
    Neither a GradScaler nor clipping by norm has a meaning for signs."""

    _momenta: BucketMemory = field(
        default_factory=lambda: BucketMemory("momentum"), init=False, repr=False, compare=False
    )

    gets_each_once = True
    wire = "one all-gather of k values and their indices of about 2 + log2(1/density) bits"
    paper = "https://arxiv.org/abs/2411.19870"

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return (self._momenta.field(gradient),)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        momentum = self._momenta.of(bucket, self.state)
        total = to_memory_dtype(buffer).add_(momentum, alpha=self.decay)
        coefficients = to_frequencies(bucket_with(bucket, total).gradients(), self.tile)
        indices = select_largest_of_chunks(coefficients, None, self.tile**2, self._per_tile)
        own = SparseVector.of(coefficients, indices, buffer.dtype)
        gathered = await gather(own, [own.count] * comm.size, comm)
        if is_known_false(gathered.all_finite):
            return buffer.fill_(torch.nan)
        sent = self._inverse(bucket, own.dense(total.dtype))
        copy_if(gathered.all_finite, total.sub_(sent), momentum)
        mean = gathered.commit(coefficients, None, torch.empty_like(buffer))
        result = self._inverse(bucket, mean.to(total.dtype))
        if self.sign:  # torch.sign(NaN) is 0
            result = torch.where(result.isnan(), result, result.sign())
        return buffer.copy_(result)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        whole, rest = divmod(bucket.buffer().numel(), self.tile**2)
        count = whole * self._per_tile + min(rest, self._per_tile)
        return gather_bytes(bucket, count, size)

    @property
    def _per_tile(self) -> int:
        return kept_elements(self.density, self.tile**2)

    def _inverse(self, bucket: GradBucket, coefficients: Tensor) -> Tensor:
        """Return the flat tensor, in the bucket's order, that has these coefficients."""
        flat = torch.empty_like(coefficients)
        from_frequencies(coefficients, bucket_with(bucket, flat).gradients(), self.tile)
        return flat
