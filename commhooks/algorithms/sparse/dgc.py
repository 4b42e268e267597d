"""Deep gradient compression: top-k of velocities, with the momentum computed on each rank.

Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018, https://arxiv.org/abs/1712.01887.

A step with momentum m and, on each rank i of N, the gradient ``g[i]``, the velocity ``u[i]`` and
the unsent sum of velocities ``v[i]``. The section numbers are those of the paper::

    for i in range(N):
        g[i] *= min(1, clip * sqrt(N) / g[i].norm())    # 3.2 local gradient clipping
        u[i] = m * u[i] + g[i]                          # 3.1 momentum correction
        v[i] = v[i] + u[i]
        indices = v[i].abs().topk(k).indices            # 3.3 warm-up: k decreases step by step
        sent[i] = torch.zeros_like(v[i]).index_copy(0, indices, v[i][indices])
        v[i] = v[i] - sent[i]
        u[i][indices] = 0                               # 3.3 momentum factor masking
    result = sum(sent) / N

The paper divides gradients by N before it clips them to clip / sqrt(N); here they are divided when
they are averaged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.sparse.base import WarmedUp
from commhooks.algorithms.sparse.messages import SparseVector, gather, gather_bytes, to_memory_dtype
from commhooks.algorithms.sparse.selection import select_largest
from commhooks.codecs.finite import copy_if
from commhooks.comm.communicator import Communicator
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from commhooks.kernels import kernel_backend_of, launch
from commhooks.kernels.launcher import streaming_blocks
from commhooks.kernels.source import SPARSE, TYPES, kernel_name
from reducer import GradBucket


@register_hook("dgc")
@dataclass
class DGC(WarmedUp):
    """Average the largest elements of each rank's accumulated velocities: top-k with momentum.

    The hook replaces the optimizer's momentum, because momentum has to be applied before elements
    are left out: **use an optimizer without momentum**, or momentum is applied twice. The result is
    the average *velocity*, not the average gradient; with ``momentum=0`` it is that of ``topk``.

    Weight decay that the optimizer adds to gradients, as ``torch.optim.SGD`` does, usually goes
    through the optimizer's momentum. Without it, weight decay is weaker by a factor of 1 / (1 - m):
    multiply it by that factor, 10 for m = 0.9.

    In a warm-up much is sent, so velocities are reset too often to build up; docs/hooks/dgc.md says
    what that costs.

    The hook keeps velocity and error, and one more copy of a bucket during a step.
    """

    density: Annotated[float, Limits(gt=0, le=1)] = 0.01
    """k as a share of the bucket's elements, after the warm-up. The paper uses 0.001."""
    warmup_steps: Annotated[int, Limits(ge=0)] = 0
    warmup_density: Annotated[float, Limits(gt=0, le=1)] = 0.25
    momentum: Annotated[float, Limits(ge=0, lt=1)] = 0.9
    """m, which replaces the optimizer's momentum."""
    clip: Annotated[float, Limits(gt=0)] | None = None
    """Largest norm of a bucket's average gradient if the gradients of the ranks are independent.
    The gradient of each rank, which is then √N times longer, is scaled down to ``clip`` · √N."""
    masking: bool = True
    """Reset the velocity of the elements that were sent, so that old gradients do not add to it."""

    error_feedback: bool = field(default=True, init=False, repr=False)
    error_dtype: torch.dtype | None = field(default=None, init=False, repr=False)

    gets_each_once = True
    paper = "https://arxiv.org/abs/1712.01887"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._velocities = BucketMemory(self, "velocity")

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return *super().state_fields(gradient), self._velocities.field(gradient)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        velocity = self._velocities.of(bucket, self.state)
        error = self._errors.of(bucket, self.state)
        u = self._clip(to_memory_dtype(buffer), comm.size)
        v = correct_momentum(u, velocity, error, self.momentum)
        k = self.sent_elements(bucket, buffer.numel())
        indices = select_largest(v, None, k)
        own = SparseVector.of(v, indices, buffer.dtype)
        gathered = await gather(own, [k] * comm.size, comm)
        if self.masking:
            u.index_fill_(0, indices.long(), 0)
        # Before the commit, which may overwrite u: it may be the bucket's buffer.
        copy_if(gathered.all_finite, u, velocity)
        return gathered.commit(v, error, buffer)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        return gather_bytes(bucket, self.sent_elements(bucket, bucket.buffer().numel()), size)

    def _clip(self, gradient: Tensor, size: int) -> Tensor:
        """Scale the gradient down in place. Non-finite elements become NaN."""
        if self.clip is None:
            return gradient
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        scale = (self.clip * math.sqrt(size) / norm).clamp(max=1)
        return gradient.mul_(scale.to(gradient.dtype))


def correct_momentum(gradient: Tensor, velocity: Tensor, error: Tensor, momentum: float) -> Tensor:
    """Add ``momentum * velocity`` to ``gradient`` in place; return that plus ``error``."""
    if kernel_backend_of(gradient) is None:
        return gradient.add_(velocity, alpha=momentum) + error
    total = torch.empty_like(gradient)
    arguments = (gradient, velocity, error, float(momentum), gradient.numel(), total)
    kernel = kernel_name("correct_momentum", TYPES[gradient.dtype])
    launch(SPARSE, kernel, arguments, grid=streaming_blocks(gradient))
    return total
