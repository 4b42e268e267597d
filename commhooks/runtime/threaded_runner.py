"""Runs the coroutines of a hook on a thread of their own, while backward computes."""

import atexit
import os
import threading
import weakref
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks._C import CompletionQueue
from commhooks.comm.stage_groups import StageGroups
from commhooks.hook.base import CommHook
from commhooks.runtime.execution import EndOfStep, HookExecution
from commhooks.runtime.scheduler import HookScheduler
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stats import StatsCollector
from reducer import GradBucket

__all__ = ["ThreadedRunner"]

_ARRIVED = -1  # token: something was appended to `arrivals`


class ThreadedRunner:
    """A :class:`~commhooks.runtime.runner.Runner` for Gloo.

    One thread runs all coroutines, so launching a bucket costs backward only a queue entry. The
    thread ends when the runner is dropped or closed. On CUDA tensors, which Gloo sends through host
    memory, the thread also has a stream of its own.

    Args:
        hook: The hook to run.
        group: The ranks to average over.
        device: The device of the buckets.
        token: A number that is the same on all ranks and that no other runner uses.
    """

    def __init__(
        self, hook: CommHook, group: dist.ProcessGroup, device: torch.device, token: int
    ) -> None:
        self.collector = StatsCollector()
        self.name = hook.name
        self.checks_finite = hook.checks_finite
        self._hook = hook
        self._group = group
        self._device = device
        self._stream = SideStream(device)
        groups = StageGroups(group, token)
        self._thread = _HookThread(hook, group.rank(), groups, self._stream, self.collector)
        # Not a reference to self: the thread must not keep the runner alive.
        self._finalizer = weakref.finalize(self, _stop, self._thread, os.getpid())
        self._finalizer.atexit = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Run the hook on ``bucket``. Errors are set in the future."""
        return self._launch(HookExecution(self._hook, bucket, self._group))

    def end_step(self, index: int, step: int) -> Future[Tensor]:
        """Vote after ``index`` buckets, none of which was the last. Errors as for a bucket."""
        end = EndOfStep(self._hook, self._group, self._device, index=index, step=step)
        return self._launch(end)

    def abandon(self) -> None:
        """End the current step early: buckets on their way fail, on all ranks."""
        self._thread.put(None)

    def close(self) -> None:
        """End the thread."""
        self._finalizer()

    def _launch(self, execution: HookExecution) -> Future[Tensor]:
        execution.mark = self._stream.mark()
        future = execution.future
        self._thread.put(execution)
        return future


class _HookThread:
    """Feeds a scheduler with new executions and completed collectives, in order of arrival."""

    def __init__(
        self,
        hook: CommHook,
        rank: int,
        groups: StageGroups,
        stream: SideStream,
        collector: StatsCollector,
    ) -> None:
        self._groups = groups
        self._stream = stream
        self._queue = CompletionQueue()
        self._scheduler = HookScheduler(hook, rank, groups, stream, collector, self._queue.watch)
        self._arrivals: deque[HookExecution | None] = deque()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def put(self, arrival: HookExecution | None) -> None:
        """Hand over an execution, or None if the step ends early."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="commhooks", daemon=True)
            self._thread.start()
            _threads.add(self)
        self._arrivals.append(arrival)
        self._queue.put(_ARRIVED)

    def stop(self) -> None:
        self._is_stopped = True
        self._groups.close()
        self._queue.put(_ARRIVED)

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    @torch.no_grad()
    def _main(self) -> None:
        with self._stream:
            while not self._is_stopped:
                token = self._queue.get()
                try:
                    self._handle(token)
                except BaseException as error:
                    # A bug of ours. If this thread ended, all ranks would wait forever.
                    self._scheduler.fail(self._scheduler.error("the runner failed", error))
        self._groups.abandon()

    def _handle(self, token: int | None) -> None:
        if token == _ARRIVED:
            if self._arrivals:
                arrival = self._arrivals.popleft()
                if arrival is None:
                    self._scheduler.end_early()
                else:
                    self._scheduler.launch(arrival)
        elif token is not None:
            self._scheduler.complete(token)


def _stop(thread: _HookThread, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the object, but not its thread
        thread.stop()


_threads: weakref.WeakSet[_HookThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # A thread that wakes up while the interpreter shuts down would crash it.
    for thread in list(_threads):
        thread.stop()
    for thread in list(_threads):
        thread.join(2.0)
