"""Use a hook only as long as its error stays within a bound.

::

    in some steps:  error = |inner(p) - exact| / |exact|    # p: a sample of gradient plus residual
                    use fallback from the next step on if error > max_error, on all ranks
    otherwise:      average = inner(gradient)
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.host_copy import HostCopy
from commhooks.algorithms.wrappers.table import HookTable, check_candidate
from commhooks.algorithms.wrappers.trial import Trial, draw_sample, relative_error
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook
from commhooks.hook.options import Limits, hook_default
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from reducer import GradBucket

_LOG = logging.getLogger("commhooks")
_MOST_SAMPLE = 1 << 20


@register_hook("guard")
@dataclass
class Guard(CommHook):
    """Measure the error of the inner hook regularly, and use another one when it is too large.

    Every ``every`` steps, on one bucket in turn, an instance of the inner hook for this purpose
    averages a sample of the gradients and what the inner hook has not sent, and so does an exact
    average. If the relative error of its average exceeds ``max_error``, all ranks log a warning and
    use ``fallback`` from the next step on. What the inner hook has not sent is added to the next
    gradients.

    Wire: that of the hook in use. In steps that measure, also an exact average of at most 1,048,576
    elements, what the inner hook sends for these, and 16 bytes.

    Raises:
        CommHookOptionError: a hook changes parameters, has no consensus, or skips steps.
    """

    inner: CommHook
    """The hook to use while its error is within the bound."""
    max_error: Annotated[float, Limits(gt=0)]
    """The bound: relative to the norm of the exact average."""
    fallback: CommHook = hook_default("allreduce")
    """The hook to use when it is not."""
    every: Annotated[int, Limits(ge=1)] = 100
    """Measure in every step whose number is a multiple of this."""
    cooldown: Annotated[int, Limits(ge=1)] | None = None
    """Steps after which the inner hook is measured again; never, if None."""

    is_adaptive = True
    lossless = True
    state_fields = no_state
    wire = "what the hook in use sends, and in some steps a sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_candidate(self.inner, f"option 'inner' of hook {self.name!r}")
        check_candidate(self.fallback, f"option 'fallback' of hook {self.name!r}")
        self._table = HookTable([self.inner, self.fallback], {})
        self._names: tuple[str, ...] = ()
        self._step = -1  # of the training: fragments of diloco have the same step of this hook
        self._buckets = 0  # of this step, so far
        self._turn = 0  # the index of the bucket that is measured in this step, if any
        self._round = 0  # how often all buckets have had their turn
        self._found: tuple[int, HostCopy] | None = None  # a step, and the squares of all ranks
        self._has_recovered = self._agrees = self._has_agreed = False
        self._last_error = 0.0
        self._notes: list[tuple[int, str]] = []
        self._fallbacks = 0

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        super().prepare(parameters, group)
        self._trial = Trial(self.inner, parameters, group, self.model_info)
        self._names = tuple(parameters)
        self._found, self._has_recovered = None, False
        self._use()

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        step, sample = bucket.step, None
        if bucket.index() == 0:
            self._begin_step(step, comm.step)
        self._buckets += 1
        if self._agrees:
            await self._agree(bucket, comm)
        is_due = step % self.every == 0
        if is_due and self.is_fallback:
            since = self.extra_state["since"]
            is_due = self.cooldown is not None and step - since >= self.cooldown
        if is_due and comm.size > 1 and bucket.index() == self._turn:
            residual = functools.partial(self._table.residual, comm.size)
            sample = draw_sample(
                bucket, bucket.names, _MOST_SAMPLE, residual=residual, turn=self._round
            )
        average = await self._table.reduce(bucket, comm)
        if sample is not None:
            squares = await self._trial.measure(sample, comm)
            self._found = comm.step, HostCopy(await comm.all_gather(squares))
        return average

    @property
    def is_fallback(self) -> bool:
        """Whether the fallback is in use."""
        return "since" in self.extra_state

    def notes(self) -> list[tuple[int, str]]:
        return [*self._notes]

    def metrics(self) -> dict[str, float]:
        own = {
            "last_error": self._last_error,
            "is_fallback": float(self.is_fallback),
            "fallbacks": float(self._fallbacks),
        }
        return own | super().metrics()

    def state_dict(self) -> dict[str, Any]:
        self._table.drop_sent()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not isinstance(since := self.extra_state.get("since", 0), int):
            raise CommHookStateError(f"hook {self.name!r}: expected a step, found {since!r}")
        self._found, self._has_recovered = None, False
        self._use()

    def recover(self) -> None:
        """Agree on the hook in the next step: only some ranks may know of a measurement."""
        super().recover()
        self._found, self._has_recovered = None, True
        self._trial.begin()
        self._table.refresh()

    def _begin_step(self, step: int, training_step: int) -> None:
        """Decide by what an earlier step has found. All ranks have found the same.

        What a step has found that begins again is dropped, because some ranks may not have it.
        """
        if training_step != self._step:
            self._step = training_step
            self._round, self._turn = divmod(step // self.every, max(self._buckets, 1))
        self._agrees, self._has_recovered = self._has_recovered, False
        self._has_agreed = False
        found, self._found = self._found, None
        if found is not None and found[0] != training_step:
            error = max(relative_error(*squares) for squares in found[1].read())
            if error == error:  # or gradients were not finite
                self._judge(error, step)
        self._buckets = 0
        self._table.begin_step()

    async def _agree(self, bucket: GradBucket, comm: Communicator) -> None:
        """Use the fallback if any rank does. In each bucket, as they do not wait for each other."""
        own = [self.extra_state.get("since", -1)]
        since = await comm.all_reduce(torch.tensor(own, device=bucket.buffer().device), op="max")
        if not self._has_agreed:
            self._has_agreed, was_fallback = True, self.is_fallback
            self.extra_state = {} if since.item() < 0 else {"since": int(since.item())}
            self._fallbacks += self.is_fallback > was_fallback
            self._use()
            self._table.begin_step()

    def _judge(self, error: float, step: int) -> None:
        self._last_error = error
        was_fallback, is_beyond = self.is_fallback, error > self.max_error
        self.extra_state = {"since": step} if is_beyond else {}
        if is_beyond == was_fallback:
            return
        self._fallbacks += is_beyond
        hook = self.fallback if is_beyond else self.inner
        relation = "exceeds" if is_beyond else "is within"
        note = (
            f"the error of {self.inner.name}, {error:.3g}, {relation} {self.max_error:.3g}; "
            f"use {hook.name} from now on"
        )
        self._notes.append((step, note))
        _LOG.warning("guard, step %d: %s", step, note)
        self._use()

    def _use(self) -> None:
        replicated = self.model_info.replicated
        self._table.change({n: int(self.is_fallback or n in replicated) for n in self._names})
