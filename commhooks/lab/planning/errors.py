"""The error of a hook's average, measured by what the hook does among a few real ranks.

::

    exact = all_reduce(gradient) / N
    error = |hook(gradient) - exact| / |exact|

Every rank has the gradients of its own batch. Hooks begin without errors of earlier steps, but with
what is the same on all ranks, such as the factors of PowerSGD: the first run only learns these.
"""

from collections.abc import Coroutine, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.comm.exchange import Exchange
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, Role, tree
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.roles import prepare
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["ErrorMeter"]


class ErrorMeter:
    """Averages the gradients of one group of parameters, exactly and with hooks."""

    def __init__(
        self, bucket: GradBucket, group: dist.ProcessGroup, roles: Mapping[str, Role], step: int
    ) -> None:
        self._bucket = bucket
        self._group = group
        self._roles = roles
        self._step = step
        self._exact = bucket.buffer().to(at_least_float32(bucket.buffer().dtype), copy=True)
        dist.all_reduce(self._exact.div_(group.size()), group=group)
        self.norm = float(self._exact.double().norm())
        """|exact|."""

    def error_of(self, hook: CommHook) -> float:
        """Return the error of a new ``hook``. Raises CommHookError if it needs several steps."""
        names, parameters = self._bucket.names, self._bucket.parameters()
        prepare(hook, dict(zip(names, parameters, strict=True)), self._group, self._roles)
        self._run(hook)
        self._forget_errors(hook)
        difference = self._run(hook).view(-1).to(self._exact.dtype) - self._exact
        wrong = float(difference.double().norm())
        if wrong == 0:
            return 0.0
        return wrong / self.norm if self.norm else float("inf")

    def _run(self, hook: CommHook) -> Tensor:
        copy = bucket_with(self._bucket, self._bucket.buffer().clone(), step=self._step)
        seed = getattr(hook, "seed", 0)
        comm = Communicator(self._group, step=self._step, key=copy.key, seed=seed)
        return _finish(hook.reduce(copy, comm), hook, self._group)

    def _forget_errors(self, hook: CommHook) -> None:
        gradients = dict(zip(self._bucket.names, self._bucket.gradients(), strict=True))
        for each in tree(hook):
            for name, entry in each.state.items():
                fields = each.state_fields(gradients[name]) if name in gradients else ()
                same = {field.name for field in fields or () if field.across_ranks == "same"}
                each.state[name] = {key: value for key, value in entry.items() if key in same}
            each.state = {name: entry for name, entry in each.state.items() if entry}


def _finish(
    coroutine: Coroutine[Any, Any, Tensor], hook: CommHook, group: dist.ProcessGroup
) -> Tensor:
    """Run a hook to its end, one collective after the other."""
    while True:
        try:
            pending = coroutine.send(None)
        except StopIteration as stop:
            average: Tensor = stop.value
            return average
        if isinstance(pending, Exchange) or pending.members:
            coroutine.close()
            raise CommHookError(
                f"hook {hook!r} cannot be planned: expected a hook that averages among all ranks "
                "in the same step"
            )
        pending.start(group).wait()
