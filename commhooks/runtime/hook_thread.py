"""The thread that runs the coroutines of a hook."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty

import torch

from commhooks.comm.threads import start_thread
from commhooks.runtime.scheduler import Scheduler
from commhooks.runtime.side_stream import SideStream


class HookThread:
    """Calls functions, and lets a scheduler continue after each collective.

    The thread starts with the first :meth:`call`, and ends after :meth:`close`. If a call raises,
    the scheduler aborts what is unfinished; also if a peer goes.

    Args:
        name: The name of the thread.
        scheduler: The scheduler, which only this thread uses once it runs.
        stream: What the thread works on.
        grace: Seconds for in-flight operations to complete after a peer failure.
    """

    def __init__(self, name: str, scheduler: Scheduler, stream: SideStream, grace: float) -> None:
        self._name = name
        self._scheduler = scheduler
        self._inbox = scheduler.waiters.inbox
        self._stream = stream
        self._grace = grace
        self._lost: dict[int, float] = {}  # epochs in which a peer has gone: when to look again
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._pid = os.getpid()
        scheduler.groups.on_loss = self._note_loss
        _threads.add(self)

    def call(self, function: Callable[[], object]) -> None:
        """Let the thread call ``function``, after what it was given before."""
        if self._thread is None:
            self._thread = start_thread(self._name, self._main)
        self._inbox.put(function)

    def wait(self, event: threading.Event | None = None) -> None:
        """Wait for an event that the thread sets, by default that it has done what it was given."""
        if not self.is_alive():
            return
        if event is None:
            event = threading.Event()
            self.call(event.set)
        while not event.wait(1.0) and self.is_alive():
            pass

    def is_alive(self) -> bool:
        """Whether the thread runs. In a forked child it does not."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Let the thread end, whatever it waits for. Does nothing in a forked child.

        The child has neither the thread nor those of the connections, which it would close for the
        parent as well, or wait for.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        self._scheduler.groups.close()
        self._inbox.put(int)  # does nothing, but wakes up the thread
        if self._thread is None:
            self._scheduler.close()

    @torch.no_grad()
    def _main(self) -> None:
        with self._stream:
            while not self._is_closed:
                try:
                    self._serve()
                except BaseException as error:
                    # A bug of ours. If this thread ended, all ranks would wait forever.
                    self._scheduler.abort_because("the runner failed", error)
        self._scheduler.close()
        while not self._inbox.empty():  # which a thread that never ends keeps alive
            self._inbox.get()

    def _serve(self) -> None:
        """Do what comes next. While the thread waits, no variable holds what it has done."""
        timeout = None
        if self._lost:
            timeout = max(0.0, min(self._lost.values()) - time.monotonic())
        try:
            item = self._inbox.get(timeout=timeout)
        except Empty:
            self._abort_without_peers()
            return
        if isinstance(item, tuple):
            self._scheduler.complete(item)
        else:
            item()

    def _note_loss(self, epoch: int) -> None:
        """Called on a thread of the watch, also after close(), so it must not start this thread."""
        self._inbox.put(partial(self._lost.setdefault, epoch, time.monotonic() + self._grace))

    def _abort_without_peers(self) -> None:
        """See Note [Messages that never end] in comm/peer_watch.py."""
        now = time.monotonic()
        for epoch in [epoch for epoch, due in self._lost.items() if due <= now]:
            self._lost[epoch] = now + self._grace
            if self._scheduler.abort_without_peer(epoch):
                del self._lost[epoch]


_threads: weakref.WeakSet[HookThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for thread in list(_threads):  # which start_thread() waits for next
        thread.close()
