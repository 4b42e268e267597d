"""Drop gradients that are not finite, on all ranks::

    all_finite = all_reduce(gradient.isfinite().all(), op=min)
    result = inner(gradient) if all_finite else 0

Note [Dropped steps]
~~~~~~~~~~~~~~~~~~~~
Whether all gradients of a step are finite is known only with its last bucket, but because of
overlap the other buckets are already being sent then. Therefore each bucket is checked by itself
before its inner hook runs:

    vote:    are all ranks' gradients in this bucket finite?    one all-reduce (min) of 4 bytes
    no:      zeros on all ranks; the inner hook does not see the bucket and does not count it
    yes:     the inner hook runs

Packing checks this rank's gradients in passing. On a GPU the host does not wait for the vote: after
a "no" the inner hook gets NaN on all ranks, so that it returns NaN and keeps its state,
as all hooks do, and zeros replace its result.

The step as a whole is handled afterwards:

- `last_step_was_skipped`, and the metric of the same name, tell all ranks whether any bucket was
  dropped. The training loop reads it after backward and leaves out the optimizer's step. This is
  necessary because zeros do not stop an optimizer: it has momentum, weight decay and the other
  buckets.
- With `whole_steps`, the inner hook's state for the *other* buckets is restored to that before the
  step, because the averages that it sent are never applied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.codecs.finite import all_finite, is_known_false, poison, select
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook.base import CommHook, refuse
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.options import hook_default
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from reducer import GradBucket


@register_hook("skip_nonfinite")
@dataclass
class SkipNonfinite(CommHook):
    """Drop gradients that are not finite on any rank: all ranks get zeros and are informed.

    A bucket with a non-finite number averages to zeros on all ranks, and the inner hook does not
    see it. A bucket also averages to zeros if the inner hook's result is not finite, for example
    beyond the range of float16. After backward, skip the optimizer's step if a bucket was
    dropped::

        loss.backward()
        if handle.hook.last_step_was_skipped:
            optimizer.zero_grad()
        else:
            optimizer.step()

    Do not use it with a ``GradScaler``, which checks gradients itself and has to see non-finite
    ones to adapt its scale. See Note [Dropped steps].

    Raises:
        CommHookOptionError: ``whole_steps`` around a hook that changes parameters, or whose
            exchanges take several steps.
    """

    inner: CommHook = hook_default("allreduce")
    """The hook that averages finite gradients."""
    whole_steps: bool = False
    """After a step with a dropped bucket, restore the inner hook's state to that before the step,
    also for the other buckets. Copies the whole state in each step. Use it if the training loop
    skips the optimizer's step; otherwise the averages of the other buckets have been applied."""

    lossless = True
    checks_finite = True
    skips_steps = True
    state_fields = no_state
    wire = "an all-reduce of 4 bytes per bucket, and what the inner hook sends"

    def __post_init__(self) -> None:
        super().__post_init__()
        # On the gradients' device, so that the host waits for it only if they are read: the
        # skipped steps and buckets before the last step, and of each bucket of the last step, ()
        # bool, whether it was finite.
        self._skipped: tuple[Tensor | int, Tensor | int] = (0, 0)
        self._were_finite: list[Tensor] = []
        self._passed_on = 0  # buckets of this step that the inner hook got
        self._withheld: list[str] = []  # parameters of the buckets that it did not get
        self._before: dict[str, Any] | None = None  # its state before this step, with `whole_steps`
        reasons = {
            "has_exchanges": "begins exchanges that take several steps, so its state cannot be "
            "saved before each step; use whole_steps=False, or a hook without a delay",
            "changes_parameters": "changes parameters, which whole_steps cannot restore; use "
            "whole_steps=False",
        }
        if self.whole_steps:
            where = f"option 'whole_steps' of hook {self.name!r}"
            refuse(where, self.inner, "a hook that averages gradients", reasons)

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        super().prepare(parameters, group)
        # On a device they belong to the stream of an earlier registration.
        steps, buckets = self._totals()
        self._skipped, self._were_finite = (int(steps), int(buckets)), []

    def collectives(self, rank: int, size: int) -> dict[tuple[int, ...], int]:
        inner = self.inner.collectives(rank, size)
        return {**inner, (): inner.get((), 0) + 1}

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        if bucket.index() == 0:
            self._begin_step()
        buffer = bucket.buffer()
        vote = await comm.all_reduce(bucket.all_finite().float().view(1), op="min")
        is_dropped = vote.view(()) == 0
        if is_known_false(vote):
            self._withheld += bucket.names
            return self._drop(bucket, ~is_dropped)
        poison(buffer, is_dropped)  # for the inner hook: see Note [Dropped steps]
        index, self._passed_on = self._passed_on, self._passed_on + 1
        if self._withheld:  # number the bucket without those that the inner hook does not get
            bucket = bucket_with(bucket, buffer, index=index, withheld=self._withheld)
        average = await self.inner.reduce(bucket, comm.within(self.inner))
        finite = all_finite(average) > is_dropped
        if is_known_false(finite):
            return self._drop(bucket, finite)
        self._were_finite.append(finite)
        return select(finite, average, 0.0)

    @property
    def last_step_was_skipped(self) -> bool:
        """Whether a bucket was dropped in the last step, or so far in the current one.

        Waits for the device.
        """
        return bool(self._dropped() > 0)

    def metrics(self) -> dict[str, float]:
        steps, buckets = self._totals()
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
        self._skipped, self._were_finite = self._totals(), []
        self._passed_on = 0
        self._withheld = []
        if self.whole_steps:
            self._before = self.inner.state_dict()

    def _drop(self, bucket: GradBucket, finite: Tensor) -> Tensor:
        self._were_finite.append(finite)
        return bucket.buffer().zero_()

    def _dropped(self) -> Tensor | int:
        """Return the number of buckets dropped in the last step."""
        if not self._were_finite:
            return 0
        device = self._were_finite[0].device
        return torch.stack([each.to(device) for each in self._were_finite]).logical_not().sum()

    def _totals(self) -> tuple[Tensor | int, Tensor | int]:
        """Return the numbers of skipped steps and buckets, including the last step."""
        (steps, buckets), dropped = self._skipped, self._dropped()
        return steps + (dropped > 0), buckets + dropped

    def _undo(self) -> None:
        """Restore the inner hook's state if the last step, which is complete, was skipped."""
        before, self._before = self._before, None
        if before is not None and self.last_step_was_skipped:
            self.inner.load_state_dict(before)
