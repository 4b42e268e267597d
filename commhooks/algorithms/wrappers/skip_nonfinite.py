"""Gradients that are not finite are dropped, on all ranks. Wire: one number more per bucket.

Note [Dropped steps]
~~~~~~~~~~~~~~~~~~~~
Whether a step is sound is known when its last bucket is, but by then the others are on their way:
that is what overlap means. So a bucket is judged by itself, before its inner hook runs,

    vote:    are all ranks' gradients in this bucket finite?         one all-reduce (min) of 4 bytes
    no:      zeros on all ranks; the inner hook never sees the bucket, and counts others without it
    yes:     the inner hook

Whether a rank's own are, packing finds out on the way. On a GPU nobody waits for the vote: after a
no the inner hook is given a NaN on all ranks, does what all hooks do, which is to return NaN and to
remember nothing, and zeros replace that.

What holds for the whole step is established afterwards:

- `last_step_was_skipped`, and the metric of that name, tell all ranks alike whether any bucket was
  dropped. The training loop asks after backward and leaves out the optimizer's step. It has to, for
  zeros do not keep an optimizer from moving: it has momentum, weight decay and the other buckets.
- With `whole_steps`, what the inner hook remembers of the *other* buckets goes back to what it was
  before the step, because what it sent then has never been applied.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commhooks.codecs.finite import all_finite, is_known_false, nan_unless, zero_unless
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.base import CommHook
from commhooks.hook.derived_bucket import bucket_without
from commhooks.hook.registry import register_hook
from reducer import GradBucket

__all__ = ["SkipNonfinite"]


@register_hook("skip_nonfinite")
@dataclass
class SkipNonfinite(CommHook):
    """Drop gradients that are not finite on any rank: all ranks get zeros and are told.

    A bucket with such a number averages to zeros on all ranks, and the inner hook does not see it.
    So does one of which the inner hook makes a result that is not finite, e.g. beyond the range of
    float16. After backward, leave out the optimizer's step where any bucket was dropped::

        loss.backward()
        if handle.hook.last_step_was_skipped:
            optimizer.zero_grad()
        else:
            optimizer.step()

    Do not use it under a ``GradScaler``, which finds what is not finite by itself and has to see it
    to adapt its scale. As an inner hook, have it outside of ``error_feedback``.

    Metrics: ``skipped_steps``, ``skipped_buckets``, and ``last_step_was_skipped`` (0 or 1), since
    the hook was made. The same on all ranks where the inner hook's results are.

    Wire: an all-reduce of 4 bytes per bucket, and that of the inner hook. On CUDA the host does not
    wait for the device before it is asked for metrics or ``last_step_was_skipped``, with
    ``whole_steps`` once in each step; and dropped buckets are sent as well: Note [Dropped steps].
    """

    inner: CommHook
    """The hook that averages what is finite."""
    whole_steps: bool = False
    """After a step with a dropped bucket, let the inner hook forget what it has remembered of the
    other buckets in that step. Costs a copy of all it remembers, in each step. For loops that leave
    out the optimizer's step; otherwise what the other buckets sent has been applied."""

    _skips: "_Skips" = field(
        default_factory=lambda: _Skips(), init=False, repr=False, compare=False
    )
    _handed_on: int = field(default=0, init=False, repr=False, compare=False)
    """Buckets of this step that the inner hook got."""
    _withheld: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Parameters of those that it did not."""
    _before: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    lossless = True
    checks_finite = True
    skips_steps = True
    wire = "an all-reduce of 4 bytes per bucket, and what the inner hook sends"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        if bucket.index() == 0:
            self._begin_step()
        buffer = bucket.buffer()
        vote = bucket.all_finite().float().view(1)
        verdict = (await comm.all_reduce(vote, op="min")).view(()) != 0
        if is_known_false(verdict):
            self._withheld += bucket.names
            return self._drop(bucket, verdict)
        head = buffer[:1]
        head.copy_(nan_unless(verdict, head))  # for the inner hook, see above
        average = await self.inner.reduce(self._numbered(bucket), comm.within(self.inner))
        verdict = all_finite(average) & verdict
        if is_known_false(verdict):
            return self._drop(bucket, verdict)
        self._skips.verdicts.append(verdict)
        return zero_unless(verdict, average)

    @property
    def last_step_was_skipped(self) -> bool:
        """Whether a bucket was dropped in the last step, or in the present one so far.

        Waits for the device.
        """
        return bool(self._skips.in_step() > 0)

    def metrics(self) -> dict[str, float]:
        steps, buckets = self._skips.totals()
        own = {
            "skipped_steps": float(steps),
            "skipped_buckets": float(buckets),
            "last_step_was_skipped": float(self.last_step_was_skipped),
        }
        return own | super().metrics()

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        inner = self.inner.wire_bytes(bucket, size)
        return None if inner is None else all_reduce_bytes(4, size) + inner

    def state_dict(self) -> dict[str, Any]:
        self._undo()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = None
        super().load_state_dict(state)

    def recover(self) -> None:
        self._before = None
        super().recover()

    def _begin_step(self) -> None:
        self._undo()
        self._skips.begin_step()
        self._handed_on = 0
        self._withheld = []
        if self.whole_steps:
            self._before = self.inner.state_dict()

    def _numbered(self, bucket: GradBucket) -> GradBucket:
        """As if those that the inner hook does not get were no part of the step."""
        index = self._handed_on
        self._handed_on += 1
        return bucket_without(bucket, self._withheld, index) if self._withheld else bucket

    def _drop(self, bucket: GradBucket, verdict: Tensor) -> Tensor:
        self._skips.verdicts.append(verdict)
        return bucket.buffer().zero_()

    def _undo(self) -> None:
        """After a dropped step, when no bucket is under way any more."""
        before, self._before = self._before, None
        if before is not None and self.last_step_was_skipped:
            self.inner.load_state_dict(before)


@dataclass
class _Skips:
    """How many there were in the steps before the last, and the verdicts on its buckets.

    Counted on the device of the gradients, for nobody may ever ask.
    """

    steps: Tensor | int = 0
    buckets: Tensor | int = 0
    verdicts: list[Tensor] = field(default_factory=list)

    def begin_step(self) -> None:
        self.steps, self.buckets = self.totals()
        self.verdicts.clear()

    def in_step(self) -> Tensor | int:
        """The buckets that were dropped in the last step."""
        if not self.verdicts:
            return 0
        device = self.verdicts[0].device
        return torch.stack([v.to(device) for v in self.verdicts]).logical_not().sum()

    def totals(self) -> tuple[Tensor | int, Tensor | int]:
        """Steps and buckets, with the last step's."""
        dropped = self.in_step()
        return self.steps + (dropped > 0), self.buckets + dropped
