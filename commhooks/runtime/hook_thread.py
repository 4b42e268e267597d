"""The thread that runs the coroutines of a hook, and those that wait for its collectives."""

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch
from torch._C._distributed_c10d import Work

from commhooks.comm.stage_groups import StageGroups
from commhooks.comm.threads import leave_thread, start_thread
from commhooks.runtime.execution import HookExecution
from commhooks.runtime.executor import Executor
from commhooks.runtime.side_stream import SideStream

_Works = SimpleQueue[tuple[Work, int] | None]


class HookThread:
    """Calls functions at once, or when a collective has completed, in that order.

    The thread starts with the first :meth:`call`, and ends after :meth:`stop`.

    A further thread per stage group waits for the Works of that group, in the order of the calls
    of :meth:`watch`. With one thread for several groups, a Work of a later bucket, which a peer
    issues only after an earlier one, could hide that the earlier one has completed. A callback of
    a Work would run Python on a thread of the backend, which must not wait for the GIL; and
    point-to-point Works of Gloo have no callbacks. As long as such a thread waits, it refers to
    nothing but the Work, a queue of tokens and the stream. The functions that the tokens stand for
    are kept here.

    Args:
        name: The name of the thread.
        groups: The stage groups that it opens.
        stream: What the threads work and wait on: Works of CUDA tensors make the current stream
            wait.
    """

    def __init__(self, name: str, groups: StageGroups, stream: SideStream) -> None:
        self.groups = groups
        self._name = name
        self._stream = stream
        self._executor: Executor | None = None
        self._queue: SimpleQueue[int] = SimpleQueue()
        self._functions: dict[int, Callable[[], None]] = {}  # by their tokens in the queue
        self._tokens = itertools.count()
        self._works: dict[Hashable, _Works] = {}  # by stage group
        self._thread: threading.Thread | None = None
        self._waiting: list[threading.Thread] = []
        self._is_stopped = False
        self._pid = os.getpid()
        _threads.add(self)

    def serve(self, executor: Executor, grace: float) -> None:
        """Let ``executor`` fail if a call raises or a peer goes. Set it before the first call.

        ``grace``: seconds for in-flight operations to complete after a peer failure.
        """

        def end(epoch: int, failed: list[HookExecution], is_over: threading.Event) -> None:
            if executor.give_up(failed):
                self._forget()
            failed[:] = executor.fail_without(epoch)
            if self.groups.epoch != epoch and not failed:
                is_over.set()

        def end_without_peer(epoch: int) -> None:
            """See Note [Messages that never end] in comm/peer_watch.py; on a thread of its own."""
            failed: list[HookExecution] = []
            is_over = threading.Event()
            while not is_over.is_set() and not self.groups.is_closed_within(grace):
                if self.is_alive():  # otherwise nothing is under way
                    self.call(lambda: end(epoch, failed, is_over))

        self._executor = executor
        self.groups.on_loss = end_without_peer

    def call(self, function: Callable[[], None]) -> None:
        """Let the thread call ``function``, after what it was given before."""
        if self._thread is None:
            self._thread = start_thread(self._name, self._main)
        self._queue.put(self._token_of(function))

    def watch(self, work: Work, function: Callable[[], None], group: Hashable) -> None:
        """Let the thread call ``function`` when ``work`` has completed, with or without an error.

        See :class:`Executor`.
        """
        if group not in self._works:
            self._works[group] = self._start_waiting()
        self._works[group].put((work, self._token_of(function)))

    def is_alive(self) -> bool:
        """Whether the thread runs. In a forked child it does not."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Let the thread end, whatever it waits for. Does nothing in a forked child.

        The child has neither the thread nor those of the connections, which it would close for the
        parent as well, or wait for.
        """
        if os.getpid() != self._pid:
            return
        self._is_stopped = True
        self.groups.close()
        self._queue.put(self._token_of(_nothing))
        if self._thread is None:
            self.groups.abandon()

    @torch.no_grad()
    def _main(self) -> None:
        assert self._executor is not None
        with self._stream:
            while not self._is_stopped:
                token = self._queue.get()
                try:
                    self._functions.pop(token)()  # no variable may hold it while the thread waits
                except BaseException as error:
                    # A bug of ours. If this thread ended, all ranks would wait forever.
                    self._executor.fail_because("the runner failed", error)
        for works in self._works.values():
            works.put(None)
        self.groups.abandon()

    def _token_of(self, function: Callable[[], None]) -> int:
        token = next(self._tokens)
        self._functions[token] = function
        return token

    def _start_waiting(self) -> _Works:
        works: _Works = SimpleQueue()
        thread = start_thread("commhooks-wait", _wait, works, self._queue, self._stream)
        self._waiting.append(thread)
        return works

    def _forget(self) -> None:
        """Let new threads wait for what no thread waits for yet; some Work may never complete."""
        while self._waiting:
            leave_thread(self._waiting.pop())
        for group, former in self._works.items():
            self._works[group] = works = self._start_waiting()
            with suppress(Empty):
                while True:
                    works.put(former.get_nowait())
            former.put(None)


def _wait(works: _Works, tokens: SimpleQueue[int], stream: SideStream) -> None:
    with stream:
        while (item := works.get()) is not None:
            work, token = item
            with suppress(Exception):  # the function of the token gets the error from the Work
                work.wait()
            del work, item  # see HookExecution.end_collective
            tokens.put(token)


def _nothing() -> None:
    """Do nothing, to wake up the thread."""


_threads: weakref.WeakSet[HookThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for thread in list(_threads):  # which start_thread() waits for next
        thread.stop()
