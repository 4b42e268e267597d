"""The base classes of sparse hooks: what they keep of a bucket, and how much they send."""

import math
from dataclasses import dataclass, field
from typing import Annotated

from commhooks.algorithms.bucket_memory import ErrorDtype, KeepsErrors
from commhooks.algorithms.sparse.selection import elements_to_send
from commhooks.hook.options import Limits
from reducer import GradBucket


@dataclass
class SparseHook(KeepsErrors):
    """Base of hooks that send some elements of each bucket and can keep the others for later.

    What they keep is as large as the gradients, in float32 (float64 for float64 gradients). If an
    element of a bucket is not finite on any rank, sent or not, the bucket averages to NaN on all
    ranks and what is kept does not change: see Note [Sparse commit] in messages.py.
    """

    error_feedback: bool = field(default=True, kw_only=True)
    """Add what a step does not send to the next gradient. Otherwise small elements are lost."""
    error_dtype: ErrorDtype = field(default=None, kw_only=True)
    """None keeps errors in float32 (float64 for float64 gradients). bfloat16, rounded
    stochastically, halves their memory."""

    wire = (
        "one all-gather of k values and their indices of about 2 + log2(1/density) bits, at most "
        "what plain averaging sends in float32"
    )


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

    @property
    def capturable_from(self) -> int | None:
        return None if self.error_feedback and self.error_dtype else self.warmup_steps

    def sent_elements(self, bucket: GradBucket, numel: int) -> int:
        """Return how many of ``numel`` elements of a bucket are sent in its step.

        Gradients change fastest in the first steps, and what is not sent then is out of date when
        it is sent: section 3.3 of https://arxiv.org/abs/1712.01887.
        """
        density = self.density
        if bucket.step < self.warmup_steps:
            decay = math.pow(density / self.warmup_density, bucket.step / self.warmup_steps)
            density = max(density, self.warmup_density * decay)
        return elements_to_send(density, numel)
