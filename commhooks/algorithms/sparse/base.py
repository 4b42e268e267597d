"""The base classes of sparse hooks: what they keep of a bucket, and how much they send."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.algorithms.sparse.selection import kept_elements
from commhooks.hook.base import CommHook
from commhooks.hook.options import Limits
from commhooks.hook.state import StateField
from commhooks.kernels import require
from reducer import GradBucket


@dataclass
class SparseHook(CommHook):
    """Base of hooks that send some elements of each bucket and can keep the others for later.

    What they keep is as large as the gradients, in float32 (float64 for float64 gradients). If an
    element of a bucket is not finite on any rank, sent or not, the bucket averages to NaN on all
    ranks and what is kept does not change: see Note [Sparse commit] in messages.py.
    """

    error_feedback: bool = field(default=True, kw_only=True)
    """Add what a step does not send to the next gradient. Otherwise small elements are lost."""

    keeps = "error"
    """The name, in the state, of what the hook keeps of each element."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._errors = BucketMemory(self.keeps)

    @property
    def tells_contribution(self) -> bool:
        """Whether the hook keeps no error: another error feedback would count it twice."""
        return not self.error_feedback

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Refuse parameters on a GPU if CuPy is not installed."""
        for device in {parameter.device for parameter in parameters.values()}:
            require(device)
        super().prepare(parameters, group)

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return (self._errors.field(gradient),) if self.error_feedback else ()

    def _error(self, bucket: GradBucket) -> Tensor | None:
        """Return what was not sent of a bucket, to be changed; None without error feedback."""
        return self._errors.of(bucket, self.state) if self.error_feedback else None


@dataclass
class WarmedUp(SparseHook):
    """Base of hooks that send a share of each bucket, which decreases during a warm-up."""

    density: Annotated[float, Limits(gt=0, le=1)] = 0.01
    """k as a share of the bucket's elements, after the warm-up."""
    warmup_steps: Annotated[int, Limits(ge=0)] = 200
    """Number of steps in which the density decreases exponentially from ``warmup_density``. What is
    not sent in early steps is out of date when it is sent."""
    warmup_density: Annotated[float, Limits(gt=0, le=1)] = 1.0
    """Density of the first step, unless ``density`` is higher."""

    def kept(self, bucket: GradBucket, numel: int) -> int:
        """Return how many of ``numel`` elements of a bucket are sent in its step.

        Gradients change fastest in the first steps, and what is not sent then is out of date when
        it is sent: section 3.3 of https://arxiv.org/abs/1712.01887.
        """
        density = self.density
        if bucket.step < self.warmup_steps:
            decay = math.pow(density / self.warmup_density, bucket.step / self.warmup_steps)
            density = max(density, self.warmup_density * decay)
        return kept_elements(density, numel)
