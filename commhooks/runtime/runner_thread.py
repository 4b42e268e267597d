"""A thread that makes calls and waits for collectives, one after the other."""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from commhooks.comm.stage_groups import StageGroups
from commhooks.native import CompletionQueue
from commhooks.runtime.executor import Executor
from commhooks.runtime.side_stream import SideStream

__all__ = ["RunnerThread"]

_CALL = -1  # token: something was appended to `calls`


class RunnerThread:
    """Feeds an executor with calls and with completed collectives, in order of arrival.

    The thread starts with the first call, and ends after :meth:`stop`.
    """

    def __init__(self, name: str, groups: StageGroups, stream: SideStream) -> None:
        self.queue = CompletionQueue()
        self.executor: Executor | None = None
        """What runs on this thread. Set it before the first call."""
        self._name = name
        self.groups = groups
        self._stream = stream
        self._calls: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        _threads.add(self)

    def call(self, function: Callable[[], None]) -> None:
        """Let the thread call ``function``, after what it was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()
        self._calls.append(function)
        self.queue.put(_CALL)

    def is_alive(self) -> bool:
        """Whether the thread runs. In a forked child it does not."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Let the thread end, whatever it waits for."""
        self._is_stopped = True
        self.groups.close()
        self.queue.put(_CALL)
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
                try:
                    self._handle(token, self.executor)
                except BaseException as error:
                    # A bug of ours. If this thread ended, all ranks would wait forever.
                    self.executor.fail(self.executor.error("the runner failed", error))
        self.groups.abandon()

    def _handle(self, token: int | None, executor: Executor) -> None:
        if token == _CALL:
            if self._calls:
                self._calls.popleft()()
        elif token is not None:
            executor.complete(token)


_threads: weakref.WeakSet[RunnerThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # A thread that wakes up while the interpreter shuts down would crash it.
    for thread in list(_threads):
        thread.stop()
    for thread in list(_threads):
        thread.join(2.0)
