"""Error feedback: what a step did not send is added to the next gradient.

Seide et al.: 1-Bit Stochastic Gradient Descent, Interspeech 2014; analysed for any compressor by
Karimireddy et al.: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019,
https://arxiv.org/abs/1901.09847 (Algorithm 2).

Letters, on each rank:  g: gradient  e: error  p = g + e  s: what of p is in the average

                    inner hook: average = mean of all s
                    e = p - s, so  s + e == g + old e:  nothing is lost

In the paper p = γ·g + e, with γ the learning rate, which a hook does not know. Here errors are in
the unit of the gradients, and keep their numbers when the learning rate or a loss scale changes.

Also what is lost before the inner hook, where gradients are in half precision and p is not: what
is rounded off, and what is beyond the range.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks.algorithms.bucket_memory import BucketMemory
from commhooks.codecs.finite import all_finite
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.base import CommHook, TensorState, tree
from commhooks.hook.registry import register_hook
from commhooks.precision import saturating_cast
from reducer import GradBucket

__all__ = ["ErrorFeedback"]


@register_hook("error_feedback")
@dataclass
class ErrorFeedback(CommHook):
    """Add what the inner hook did not send to the next gradient.

    The inner hook has to say what it sends (``tells_contribution``); one that does not is refused
    when this hook is made. Those with a memory of their own do not: errors would count twice. Nor
    do those that may leave out more than they are given, as ``terngrad`` and ``randomk``: errors
    would grow, see Note [Errors that do not grow] in algorithms/quantized/base.py.

    Wire: that of the inner hook. Memory: the errors, as large as the gradients in float32 (float64
    for float64 gradients), and as much again to work in.

    If the average of a bucket is not finite, the errors of its parameters stay as they were: see
    Note [One commit] in algorithms/lowrank/powersgd.py. Does not synchronize the device.

    Raises:
        CommHookOptionError: the inner hook does not say what it sends.
    """

    inner: CommHook
    """The hook that gets the sum of gradient and error."""

    _memory: BucketMemory = field(
        default_factory=lambda: BucketMemory("error"), init=False, repr=False, compare=False
    )

    _sums: BucketMemory = field(
        default_factory=lambda: BucketMemory("sum"), init=False, repr=False, compare=False
    )
    _unsaved: TensorState = field(default_factory=dict, init=False, repr=False, compare=False)
    """Where ``_sums`` are kept, so that each step finds memory to work in."""

    wire = "what the inner hook sends"
    paper = "https://arxiv.org/abs/1901.09847"

    def __post_init__(self) -> None:
        super().__post_init__()
        for hook in tree(self.inner):
            if not hook.tells_contribution:
                raise CommHookOptionError(
                    f"option 'inner' of hook {self.name!r}: expected a hook that says what of each "
                    f"gradient it sends; {hook!r} does not, because it keeps an error of its own, "
                    "because it may leave out more than it is given, so that errors would grow in "
                    "each step, or because that has no meaning for it. Use it without "
                    "error_feedback"
                )

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        error = self._memory.of(bucket, self.state)
        p = torch.add(error, bucket.buffer(), out=self._sums.of(bucket, self._unsaved))
        # The factor 2 leaves room for rounding up.
        bucket.buffer().copy_(saturating_cast(p, bucket.buffer().dtype, headroom=2))
        nested = comm.within(self.inner, wants_contribution=True)
        average = await self.inner.reduce(bucket, nested)
        if nested.contribution is None:
            raise CommHookError(
                f"expected {self.inner!r} to set comm.contribution, as its class says that it does "
                "(tells_contribution), found None"
            )
        unsent = p.sub_(nested.contribution)
        torch.where(all_finite(average), unsent, error, out=error)
        return average

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        return self.inner.wire_bytes(bucket, size)
