"""Runs the coroutines of a hook on a thread of their own, while backward computes."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from commhooks.comm.stage_groups import StageGroups
from commhooks.hook.base import tree
from commhooks.runtime.exchange_scheduler import ExchangeScheduler
from commhooks.runtime.execution import EndOfStep, HookExecution
from commhooks.runtime.hook_thread import HookThread
from commhooks.runtime.runner import Runner
from commhooks.runtime.step_scheduler import StepScheduler
from commhooks.runtime.waiters import Waiters
from reducer import GradBucket

_GRACE_SECONDS = 2.0
"""Grace period for in-flight operations after a peer failure."""

_EXCHANGE_GRACE_SECONDS = 30.0
"""Without a vote, a peer may have completed all, and leave, while this rank still receives."""


class ThreadedRunner(Runner):
    """Runs hooks on Gloo.

    One thread runs all coroutines, so launching a bucket costs backward only a queue entry. The
    thread ends when the runner is dropped or closed. On CUDA tensors, which Gloo sends through host
    memory, the thread also has a stream of its own. Exchanges have another thread.
    """

    fails_everywhere = True
    """For the engine: Note [All ranks or none] in step_scheduler.py."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rank, stream = self._group.rank(), self._stream
        groups = StageGroups(self._group, self._token, purpose="exchanges")
        self._exchanges = exchanges = ExchangeScheduler(rank, groups, Waiters(stream))
        self._exchange_thread = HookThread(
            "commhooks-exchange", exchanges, stream, _EXCHANGE_GRACE_SECONDS
        )
        self._steps = steps = StepScheduler(
            self._hook,
            self._group,
            StageGroups(self._group, self._token),
            Waiters(stream),
            stream,
            self.collector,
            exchanges,
            self._exchange_thread,
        )
        self._thread = thread = HookThread("commhooks", steps, stream, _GRACE_SECONDS)
        # No function may refer to self, because the threads must not keep the runner alive.
        exchanges.on_end = lambda ended: thread.call(lambda: steps.continue_after(ended))
        self._finalizer = weakref.finalize(self, _close, thread, self._exchange_thread)
        self._finalizer.atexit = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        self.is_captured(bucket.step)
        return self._launch(HookExecution(self._hook, bucket, self._group))

    def connect(self, stages: Mapping[tuple[int, ...], int]) -> None:
        """Connect these stage groups, before the threads start."""
        self._steps.groups.connect(stages)
        if any(each.has_exchanges for each in tree(self._hook)):
            self._exchanges.groups.connect(stages)

    def end_step(self, index: int, step: int) -> Future[Tensor]:
        """Vote after ``index`` buckets without a last one."""
        nothing = torch.empty(0, device=self._device)
        bucket = GradBucket(nothing, [], [], index=index, step=step)
        return self._launch(EndOfStep(self._hook, bucket, self._group))

    def abort(self, has_run: bool = True) -> None:
        steps = self._steps
        self._thread.call(lambda: steps.abort_incomplete(has_run))

    def drain(self) -> None:
        self._thread.wait()  # so that exchanges of the last step have been handed over,
        self._exchange_thread.wait()  # and have begun
        self._exchange_thread.wait(self._exchanges.is_idle)
        self._thread.wait()  # so that they have been recorded

    def close(self) -> None:
        """End the threads. The host waits for the device, which may use what a hook keeps."""
        self._stream.synchronize()
        self._finalizer()

    def _launch(self, execution: HookExecution) -> Future[Tensor]:
        execution.launch(self._stream, timed=True)
        steps, future = self._steps, execution.future
        self._thread.call(lambda: steps.launch(execution))
        return future


def _close(*threads: HookThread) -> None:
    for thread in threads:
        thread.close()
