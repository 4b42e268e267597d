"""Runs a hook to its end on the thread that runs backward, where order is kept by the backend."""

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks.errors import CommHookError
from commhooks.hook import CommHook
from commhooks.stats import Ledger
from commhooks.task import Task
from reducer import GradBucket

__all__ = ["InlineDriver"]


class InlineDriver:
    """A hook for a reducer, for backends that complete collectives in the order of issue.

    On NCCL waiting for a collective orders streams and returns at once, so communication overlaps
    with backward all the same. With one rank nothing is issued.
    """

    def __init__(self, hook: CommHook, group: dist.ProcessGroup) -> None:
        self.ledger = Ledger()
        self.name = hook.name
        self._hook = hook
        self._group = group
        self._has_failed = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Runs the hook on ``bucket``. Errors are CommHookErrors, set in the future."""
        if self._has_failed:
            self._has_failed = False
            self._hook.recover()
        task = Task(self._hook, bucket, self._group)
        future = task.future
        try:
            with torch.no_grad():
                result = self._run(task)
        except CommHookError as error:
            self._has_failed = True
            task.fail(error)
            return future
        self.ledger.record(bucket, task.comm.wire_bytes, time.perf_counter() - task.start)
        future.set_result(result)
        return future

    def abandon(self) -> None:
        """Nothing is ever on its way."""

    def close(self) -> None:
        """There is nothing to end."""

    def _run(self, task: Task) -> Tensor:
        while (result := task.step()) is None:
            request, task.request = task.request, None
            assert request is not None
            if task.comm.size == 1 or request.is_vote:
                continue
            task.issued += 1
            try:
                request.start(self._group).wait()
            except Exception as error:
                raise task.refuse(error) from error
            task.comm.wire_bytes += request.count()
        return result
