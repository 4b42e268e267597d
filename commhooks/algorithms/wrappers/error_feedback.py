"""Error feedback: add what a step did not send to the next gradient.

Seide et al.: 1-Bit Stochastic Gradient Descent, Interspeech 2014; analyzed for any compressor by
Karimireddy et al.: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019,
https://arxiv.org/abs/1901.09847 (Algorithm 2).

A step with the gradient g and the error e of each rank, where s is the part of p that is in the
average::

    p = g + decay * e
    average, s = inner(p)    # average = mean of s over all ranks
    e = p - s                # s + e == g + old e, with decay 1: nothing is lost

A decay below 1 forgets what could not be sent for many steps, as SparseLoCo does with 0.95
(https://arxiv.org/abs/2508.15706). If the inner hook leaves out at most a share q of its input, the
errors are at most q / (1 - decay * q) times the gradients.

The paper has p = γ·g + e with the learning rate γ, which a hook does not know. Here the error is in
the unit of the gradients, and does not change when the learning rate or a loss scale changes.

Sums that an all-reduce rounds on its way are lost, as with ``bf16`` without ``two_shot``.

If gradients are in half precision, p is not. The error then also holds what is lost by converting p
to the gradients' dtype: rounding errors, and numbers beyond the range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory, ErrorDtype, PerBucketCache, widened
from commhooks.codecs.finite import all_finite
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.base import CommHook, tree
from commhooks.hook.options import Limits, hook_default
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from commhooks.kernels import require_for
from commhooks.precision import at_least_float32, saturating_cast
from reducer import GradBucket


@register_hook("error_feedback")
@dataclass
class ErrorFeedback(CommHook):
    """Add what the inner hook did not send to the next gradient.

    The inner hook has to tell its contribution (``tells_contribution``); otherwise this hook cannot
    be created. Hooks that keep an error of their own do not tell it, because the error would count
    twice. Neither do hooks whose error may be larger than the gradient, such as ``terngrad`` and
    ``randomk``: errors would grow, see Note [Errors that do not grow] in
    algorithms/quantized/base.py.

    Memory: the errors, as large as the gradients in float32 (float64 for float64 gradients), and a
    work buffer of the same size.

    If the average of a bucket is not finite, the errors of its parameters do not change. Does not
    synchronize the device.

    Raises:
        CommHookOptionError: the inner hook does not tell its contribution.
    """

    inner: CommHook = hook_default("bf16")
    """The hook that runs on the sum of gradient and error."""
    decay: Annotated[float, Limits(ge=0, le=1)] = 1.0
    """The factor of the error when it is added to the gradient. Below 1, what could not be sent for
    many steps is forgotten, and averages are biased."""
    error_dtype: ErrorDtype = field(default=None, kw_only=True)
    """None keeps errors in float32 (float64 for float64 gradients). bfloat16, rounded
    stochastically, halves their memory."""

    wire = "what the inner hook sends"
    paper = "https://arxiv.org/abs/1901.09847"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._memory = BucketMemory(self, "error", self.error_dtype)
        self._sums: PerBucketCache[Tensor] = PerBucketCache(self)  # work buffers
        for hook in tree(self.inner):
            if not hook.tells_contribution:
                raise CommHookOptionError(
                    f"option 'inner' of hook {self.name!r}: expected a hook that tells its "
                    f"contribution to the average; {hook!r} has none, keeps errors itself, or "
                    "makes errors that may be larger than the gradient and would grow. If it has "
                    "an option error_feedback, set it to False; otherwise use it alone"
                )

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError if a device cannot run the kernel that rounds errors in bfloat16."""
        super().prepare(parameters, group)
        if self.error_dtype is not None:
            require_for(parameters.values())

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return (self._memory.field(gradient),)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        with widened(self._memory.of(bucket, self.state), bucket, comm) as error:
            return await self._average(bucket, comm, error)

    async def _average(self, bucket: GradBucket, comm: Communicator, error: Tensor) -> Tensor:
        buffer = bucket.buffer()
        sums = self._sums.get(bucket)
        if sums is None:
            dtype = at_least_float32(buffer.dtype)
            sums = self._sums.put(bucket, torch.empty_like(buffer, dtype=dtype))
        p = torch.add(buffer, error, alpha=self.decay, out=sums)
        # The factor 2 leaves room for rounding up.
        buffer.copy_(saturating_cast(p, buffer.dtype, headroom=2))
        nested = comm.within(self.inner, wants_contribution=True)
        average = await self.inner.reduce(bucket, nested)
        if nested.contribution is None:
            raise CommHookError(
                f"expected {self.inner!r} to set comm.contribution, because its tells_contribution "
                "is true, found None"
            )
        unsent = p.sub_(nested.contribution)
        torch.where(all_finite(average), unsent, error, out=error)
        return average

    @property
    def capturable_from(self) -> int | None:
        return 0 if self.error_dtype is None else None

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        return self.inner.wire_bytes(bucket, size)
