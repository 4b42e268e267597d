"""Runs the coroutines of a hook on a thread of their own, while backward computes."""

import atexit
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.hook.capabilities import any_declares, declares
from commhooks.native import CompletionQueue
from commhooks.runtime.exchange_scheduler import ExchangeScheduler
from commhooks.runtime.execution import (
    EndOfStep,
    ExchangeExecution,
    HookExecution,
    check_capture,
)
from commhooks.runtime.executor import Executor
from commhooks.runtime.scheduler import HookScheduler
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stats import StatsCollector
from reducer import GradBucket

_GRACE_SECONDS = 2.0
"""Most of what is on its way when a peer goes fails or completes within this time."""

_EXCHANGE_GRACE_SECONDS = 30.0
"""Without a vote, a peer may have completed all, and leave, while this rank still receives."""


class ThreadedRunner:
    """A :class:`~commhooks.runtime.runner.Runner` for Gloo.

    One thread runs all coroutines, so launching a bucket costs backward only a queue entry. The
    thread ends when the runner is dropped or closed. On CUDA tensors, which Gloo sends through host
    memory, the thread also has a stream of its own. Exchanges have another thread.

    Args:
        hook: The hook to run.
        group: The ranks to average over.
        device: The device of the buckets.
        token: A number that is the same on all ranks and that no other runner uses.
        collector: What records the costs; by default a new one.
    """

    def __init__(
        self,
        hook: CommHook,
        group: dist.ProcessGroup,
        device: torch.device,
        token: int,
        collector: StatsCollector | None = None,
    ) -> None:
        self.collector = collector or StatsCollector()
        self.name = hook.name
        self.checks_finite = declares(hook, "checks_finite")
        self._times_launches = any_declares(hook, "times_launches")
        self._hook = hook
        self._group = group
        self._device = device
        self._stream = SideStream(device)
        groups = StageGroups(group, token)
        self._thread = thread = _Thread("commhooks", groups, self._stream)

        # No function may refer to self, because the threads must not keep the runner alive.
        def continue_after(exchange: ExchangeExecution) -> None:
            thread.call(lambda: scheduler.continue_after(exchange))

        self._exchanges = _Exchanges(group, token, self._stream, continue_after)
        self._scheduler = scheduler = HookScheduler(
            hook, group, groups, self._stream, self.collector, thread.watch, self._exchanges
        )
        groups.on_loss = functools.partial(
            _end_without_peer, thread, scheduler.executor, _GRACE_SECONDS
        )
        thread.executor = scheduler.executor
        self._finalizer = weakref.finalize(
            self, _stop, (thread, self._exchanges.thread), os.getpid()
        )
        self._finalizer.atexit = False

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Run the hook on ``bucket``. Errors are set in the future."""
        check_capture(self._hook, self._device, may=False)
        return self._launch(HookExecution(self._hook, bucket, self._group))

    def connect(self, stages: Mapping[tuple[int, ...], int]) -> None:
        """Connect these stage groups, before the threads start."""
        self._thread.groups.connect(stages)
        if any_declares(self._hook, "has_exchanges"):
            self._exchanges.thread.groups.connect(stages)

    def end_step(self, index: int, step: int) -> Future[Tensor]:
        """Vote after ``index`` buckets without a last one. Errors as for a bucket."""
        nothing = torch.empty(0, device=self._device)
        bucket = GradBucket(nothing, [], [], index=index, step=step)
        return self._launch(EndOfStep(self._hook, bucket, self._group))

    def abandon(self) -> None:
        """End the current step early: buckets on their way fail, on all ranks."""
        self._thread.call(self._scheduler.end_early)

    def flush(self) -> None:
        """Wait until the exchanges that have begun are over, with or without an error."""
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
        execution.launch(self._stream, timed=self._times_launches)
        scheduler, future = self._scheduler, execution.future
        self._thread.call(lambda: scheduler.launch(execution))
        return future


class _Exchanges:
    """The thread of exchanges, as the thread of steps sees it. It starts with the first one."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        token: int,
        stream: SideStream,
        on_end: Callable[[ExchangeExecution], None],
    ) -> None:
        self._groups = groups = StageGroups(group, token, purpose="exchanges")
        self.thread = thread = _Thread("commhooks-exchange", groups, stream)
        self._scheduler = scheduler = ExchangeScheduler(group.rank(), groups, thread.watch, on_end)
        groups.on_loss = functools.partial(
            _end_without_peer, thread, scheduler.executor, _EXCHANGE_GRACE_SECONDS
        )
        thread.executor = scheduler.executor
        self._are_dropped = threading.Event()
        self._are_dropped.set()

    def begin(self, exchanges: Sequence[ExchangeExecution]) -> None:
        self.thread.call(lambda: self._scheduler.begin(exchanges))

    def drop(self, error: CommHookError) -> None:
        if self.thread.is_alive():
            self._groups.publish(str(error))  # at once: the thread may wait for peers
            self._are_dropped.clear()
            self.thread.call(lambda: self._drop(error))
        else:
            self._scheduler.drop_all(error)

    def settle(self) -> None:
        while self.thread.is_alive() and not self._are_dropped.wait(1.0):
            pass

    def _drop(self, error: CommHookError) -> None:
        try:
            self._scheduler.drop_all(error)
        finally:
            self._are_dropped.set()

    def when_idle(self, function: Callable[[], None]) -> None:
        """Call ``function`` once the exchanges that have begun are over."""
        if self.thread.is_alive():
            self.thread.call(lambda: self._scheduler.when_idle(function))
        else:
            function()


class _Thread:
    """Calls functions at once, or when a collective has completed, in that order.

    The thread starts with the first :meth:`call`, and ends after :meth:`stop`.
    """

    def __init__(self, name: str, groups: StageGroups, stream: SideStream) -> None:
        self.queue = CompletionQueue()
        self.executor: Executor | None = None
        """What fails if a call raises. Set it before the first call."""
        self._name = name
        self.groups = groups
        self._stream = stream
        self._functions: dict[int, Callable[[], None]] = {}  # by their tokens in the queue
        self._tokens = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        _threads.add(self)

    def call(self, function: Callable[[], None]) -> None:
        """Let the thread call ``function``, after what it was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()
        self.queue.put(self._token_of(function))

    def watch(self, work: Work, function: Callable[[], None], stage: int) -> None:
        """Let the thread call ``function`` when ``work`` has completed: see :class:`Executor`."""
        self.queue.watch(work, self._token_of(function), stage)

    def is_alive(self) -> bool:
        """Whether the thread runs. In a forked child it does not."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Let the thread end, whatever it waits for."""
        self._is_stopped = True
        self.groups.close()
        self.queue.put(self._token_of(_nothing))
        if self._thread is None:
            self.groups.abandon()

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    @torch.no_grad()
    def _main(self) -> None:
        assert self.executor is not None
        with self._stream:
            while not self._is_stopped:
                token = self.queue.get()
                assert token is not None  # without a time-out
                try:
                    self._functions.pop(token)()  # no variable may hold it while the thread waits
                except BaseException as error:
                    # A bug of ours. If this thread ended, all ranks would wait forever.
                    self.executor.fail_because("the runner failed", error)
        self.groups.abandon()

    def _token_of(self, function: Callable[[], None]) -> int:
        token = next(self._tokens)
        self._functions[token] = function
        return token


def _end_without_peer(thread: _Thread, executor: Executor, grace: float, epoch: int) -> None:
    """See Note [Messages that never end] in comm/peer_watch.py. Runs on a thread of its own."""

    def end() -> None:
        if executor.give_up():
            thread.queue.forget()
        executor.fail_without(epoch)

    is_noticed = False
    while not is_noticed and not thread.groups.is_closed_within(grace):
        is_noticed = thread.groups.epoch != epoch
        thread.call(end)


def _stop(threads: Sequence[_Thread], pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the objects, but not their threads
        for thread in threads:
            thread.stop()


def _nothing() -> None:
    """Do nothing, to wake up the thread."""


_threads: weakref.WeakSet[_Thread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # A thread that wakes up while the interpreter shuts down would crash it.
    for thread in list(_threads):
        thread.stop()
    for thread in list(_threads):
        thread.join(2.0)
