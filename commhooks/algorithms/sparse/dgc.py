"""Deep gradient compression: top-k of gradients that have gone through momentum on each rank.

Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018, https://arxiv.org/abs/1712.01887;
sections and letters as there:

    u    velocity of this rank            v    what this rank has yet to send
    g    gradient of this rank            m    momentum

    g = g · min(1, clip · √N / |g|)       3.2  local gradient clipping, N ranks
    u = m·u + g;  v = v + u               3.1  momentum correction
    send the k largest of v; of these     3.1  as topk does
        v = 0
        u = 0                             3.3  momentum factor masking
    k shrinks step by step                3.3  warm-up training

The paper's gradients are divided by N before they are clipped, to clip / √N; these are divided when
they are averaged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.sparse.density import Density
from commhooks.algorithms.sparse.gathered_parts import gather
from commhooks.algorithms.sparse.part import (
    SparsePart,
    gather_bytes,
    kept_elements,
    to_memory_dtype,
)
from commhooks.algorithms.sparse.selection import correct_momentum, require_kernels, select_largest
from commhooks.codecs.finite import copy_if, is_known_false
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from commhooks.hook.options import Ge, Gt, Le, Lt
from commhooks.hook.registry import register_hook
from reducer import GradBucket

__all__ = ["DGC"]


@register_hook("dgc")
@dataclass
class DGC(CommHook):
    """Average the largest numbers of velocities that each rank accumulates: top-k with momentum.

    The hook takes over the optimizer's momentum, before anything is left out: **use an optimizer
    without momentum**, or it is applied twice. So the result stands for the average *velocity*, not
    the average gradient; with ``momentum=0`` it is that of ``topk``.

    Weight decay that an optimizer adds to gradients, as ``torch.optim.SGD`` does, goes through its
    momentum. Without, it is 1 / (1 - m) times too weak: multiply it with that, 10 for 0.9.

    In a short training, of which the warm-up is a large part, velocities are reset too often to
    build up; without ``masking`` less is lost there, see docs/hooks/sparse.md.

    Wire, per bucket and step: as ``topk``, one all-gather of k values in the bucket's dtype and
    their indices, about 2 + log2(1/density) bits each. Memory: velocities and errors, each as large
    as the gradients, in float32 (float64 for float64 gradients), and one more copy during a step.

    A bucket with a number that is not finite, on any rank, averages to NaN on all ranks and leaves
    velocities and errors as they were. See Note [Sparse commit] in algorithms/sparse/base.py.
    """

    density: Annotated[float, Gt(0), Le(1)] = 0.01
    """k, as a share of the bucket's elements, after the warm-up. The paper's is 0.001."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """m, instead of the optimizer's."""
    clip: Annotated[float, Gt(0)] | None = None
    """The largest norm of the average gradient of a bucket, where ranks' gradients are independent:
    each rank's, √N times as long then, is cut to this times √N."""
    masking: bool = True
    """Forget the velocity of what has been sent, so that no stale gradient carries it on."""
    warmup_steps: Annotated[int, Ge(0)] = 200
    """Steps in which the density falls exponentially, from ``warmup_density``."""
    warmup_density: Annotated[float, Gt(0), Le(1)] = 0.25
    """The density of the first step, unless ``density`` is higher."""

    _velocities: BucketMemory = field(
        default_factory=lambda: BucketMemory("velocity"), init=False, repr=False, compare=False
    )
    _errors: BucketMemory = field(
        default_factory=lambda: BucketMemory("error"), init=False, repr=False, compare=False
    )

    wire = "one all-gather of k values and their indices of about 2 + log2(1/density) bits"
    paper = "https://arxiv.org/abs/1712.01887"

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Refuses parameters on a GPU without CuPy."""
        require_kernels(parameters)
        super().prepare(parameters, group)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        velocity = self._velocities.of(bucket, self.state)
        error = self._errors.of(bucket, self.state)
        u = self._clipped(to_memory_dtype(buffer), comm.size)
        v = correct_momentum(u, velocity, error, self.momentum)
        count = kept_elements(self._density.at(bucket.step), buffer.numel())
        own = SparsePart.of(v, select_largest(v, None, count), buffer.dtype)
        parts = await gather(own, [count] * comm.size, buffer.numel(), comm)
        if is_known_false(parts.verdict):
            return buffer.fill_(torch.nan)
        if self.masking:
            u.index_fill_(0, own.indices.long(), 0)
        copy_if(parts.verdict, u, velocity)
        return parts.end(own, v, error, buffer)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        return gather_bytes(bucket, self._density.at(bucket.step), size)

    @property
    def _density(self) -> Density:
        return Density(self.density, self.warmup_density, self.warmup_steps)

    def _clipped(self, gradient: Tensor, size: int) -> Tensor:
        """In place. What is not finite becomes NaN."""
        if self.clip is None:
            return gradient
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        scale = (self.clip * math.sqrt(size) / norm).clamp(max=1)
        return gradient.mul_(scale.to(gradient.dtype))
