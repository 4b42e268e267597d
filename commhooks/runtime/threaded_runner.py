"""Runs the coroutines of a hook on a thread of their own, while backward computes."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError
from commhooks.hook.base import tree
from commhooks.runtime.exchange_scheduler import ExchangeScheduler
from commhooks.runtime.execution import (
    EndOfStep,
    ExchangeExecution,
    HookExecution,
)
from commhooks.runtime.hook_thread import HookThread
from commhooks.runtime.runner import Runner
from commhooks.runtime.scheduler import HookScheduler
from commhooks.runtime.side_stream import SideStream
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = StageGroups(self._group, self._token)
        self._thread = thread = HookThread("commhooks", groups, self._stream)

        # No function may refer to self, because the threads must not keep the runner alive.
        def continue_after(exchange: ExchangeExecution) -> None:
            thread.call(lambda: scheduler.continue_after(exchange))

        self._exchanges = _Exchanges(self._group, self._token, self._stream, continue_after)
        self._scheduler = scheduler = HookScheduler(
            self._hook,
            self._group,
            groups,
            self._stream,
            self.collector,
            thread.watch,
            self._exchanges,
        )
        thread.serve(scheduler.executor, _GRACE_SECONDS)
        self._finalizer = weakref.finalize(self, _stop, (thread, self._exchanges))
        self._finalizer.atexit = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        self.check_capture()
        return self._launch(HookExecution(self._hook, bucket, self._group))

    def connect(self, stages: Mapping[tuple[int, ...], int]) -> None:
        """Connect these stage groups, before the threads start."""
        self._thread.groups.connect(stages)
        if any(each.has_exchanges for each in tree(self._hook)):
            self._exchanges.groups.connect(stages)

    def end_step(self, index: int, step: int) -> Future[Tensor]:
        """Vote after ``index`` buckets without a last one."""
        nothing = torch.empty(0, device=self._device)
        bucket = GradBucket(nothing, [], [], index=index, step=step)
        return self._launch(EndOfStep(self._hook, bucket, self._group))

    def abandon(self) -> None:
        self._thread.call(self._scheduler.end_early)

    def flush(self) -> None:
        exchanges, thread, over = self._exchanges, self._thread, threading.Event()
        if thread.is_alive():
            # A round trip, so that this thread has recorded them before it returns.
            thread.call(lambda: exchanges.when_idle(lambda: thread.call(over.set)))
            over.wait()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let the caller work on the stream of the threads, which have nothing to do."""
        self.flush()
        with self._stream.forked():
            yield

    def close(self) -> None:
        """End the threads. The host waits for the device, which may use what a hook keeps."""
        self._stream.synchronize()
        self._finalizer()

    def _launch(self, execution: HookExecution) -> Future[Tensor]:
        execution.launch(self._stream, timed=True)
        scheduler, future = self._scheduler, execution.future
        self._thread.call(lambda: scheduler.launch(execution))
        return future


class _Exchanges(HookThread):
    """The thread of exchanges, as the thread of steps sees it. It starts with the first one."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        token: int,
        stream: SideStream,
        on_end: Callable[[ExchangeExecution], None],
    ) -> None:
        groups = StageGroups(group, token, purpose="exchanges")
        super().__init__("commhooks-exchange", groups, stream)
        self._scheduler = ExchangeScheduler(group.rank(), groups, self.watch, on_end)
        self.serve(self._scheduler.executor, _EXCHANGE_GRACE_SECONDS)
        self._are_dropped = threading.Event()
        self._are_dropped.set()

    def begin(self, exchanges: Sequence[ExchangeExecution]) -> None:
        self.call(lambda: self._scheduler.begin(exchanges))

    def drop(self, error: CommHookError) -> None:
        if self.is_alive():
            self.groups.publish(str(error))  # at once: the thread may wait for peers
            self._are_dropped.clear()
            self.call(lambda: self._drop(error))
        else:
            self._scheduler.drop_all(error)

    def settle(self) -> None:
        while self.is_alive() and not self._are_dropped.wait(1.0):
            pass

    def _drop(self, error: CommHookError) -> None:
        try:
            self._scheduler.drop_all(error)
        finally:
            self._are_dropped.set()

    def when_idle(self, function: Callable[[], None]) -> None:
        """Call ``function`` once the exchanges that have begun are over."""
        if self.is_alive():
            self.call(lambda: self._scheduler.when_idle(function))
        else:
            function()


def _stop(threads: Sequence[HookThread]) -> None:
    for thread in threads:
        thread.stop()
