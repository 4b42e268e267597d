"""Runs a trial of a hook among a few real ranks, each with the gradients of its own batch."""

from collections.abc import Coroutine, Mapping
from typing import Any

import torch.distributed as dist

from commhooks.algorithms.adaptive.trial import Outcome, Trial
from commhooks.comm.communicator import Communicator
from commhooks.comm.exchange import Exchange
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, Role
from commhooks.hook.derived_bucket import bucket_with
from reducer import GradBucket

__all__ = ["try_hook"]


def try_hook(
    hook: CommHook,
    bucket: GradBucket,
    group: dist.ProcessGroup,
    roles: Mapping[str, Role],
    step: int,
) -> Outcome:
    """Average a bucket, which does not change, as in a trial of ``auto``.

    Raises CommHookError if the hook cannot average it.
    """
    trial = Trial(hook)
    trial.prepare(dict(zip(bucket.names, bucket.parameters(), strict=True)), group, roles)
    sample = bucket_with(bucket, bucket.buffer().clone(), step=step)
    comm = Communicator(group, step=step, key=sample.key, seed=0)
    return _finish(trial.run(sample, comm), hook, group)


def _finish(
    coroutine: Coroutine[Any, Any, Outcome], hook: CommHook, group: dist.ProcessGroup
) -> Outcome:
    """Run a trial to its end, one collective after the other."""
    while True:
        try:
            pending = coroutine.send(None)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        if isinstance(pending, Exchange) or pending.members:
            coroutine.close()
            raise CommHookError(
                f"hook {hook!r} cannot be planned: expected a hook that averages among all ranks "
                "in the same step"
            )
        pending.start(group).wait()
