"""A queue on which one thread waits for many collectives."""

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

from torch._C._distributed_c10d import Work

from commhooks.runtime.side_stream import SideStream

_Works = SimpleQueue[tuple[Work, int] | None]


class CompletionQueue:
    """A queue of integer tokens, each appended directly or once a Work has completed.

    A thread per stage waits for the Works of that stage, in the order of the calls of
    :meth:`watch`. A callback of a Work would run Python on a thread of the backend, which must not
    wait for the GIL; and point-to-point Works of Gloo have no callbacks. As long as a thread waits,
    it refers to nothing but the Work, the queue and the stream.

    Args:
        stream: What the threads wait on: Works of CUDA tensors make the current stream wait.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self._tokens: SimpleQueue[int] = SimpleQueue()
        self._stages: dict[int, _Works] = {}
        self._threads: list[threading.Thread] = []

    def put(self, token: int) -> None:
        """Append ``token``."""
        self._tokens.put(token)

    def get(self) -> int:
        """Remove and return the oldest token, waiting for one."""
        return self._tokens.get()

    def watch(self, work: Work, token: int, stage: int) -> None:
        """Append ``token`` once ``work`` has completed, with or without an error."""
        if stage not in self._stages:
            self._stages[stage] = self._start_thread()
        self._stages[stage].put((work, token))

    def forget(self) -> None:
        """Let new threads wait for what no thread waits for yet; some Work may never complete."""
        self._threads.clear()
        for stage, former in self._stages.items():
            self._stages[stage] = works = self._start_thread()
            with suppress(Empty):
                while True:
                    works.put(former.get_nowait())
            former.put(None)

    def close(self) -> None:
        """Let each thread end once its Works have completed."""
        for works in self._stages.values():
            works.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the threads have ended, for at most ``timeout`` seconds each."""
        for thread in self._threads:
            thread.join(timeout)

    def _start_thread(self) -> _Works:
        works: _Works = SimpleQueue()
        # A daemon, because a Work may never complete.
        thread = threading.Thread(
            target=_wait,
            args=(works, self._tokens, self._stream),
            name="commhooks-wait",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()
        return works


def _wait(works: _Works, tokens: SimpleQueue[int], stream: SideStream) -> None:
    with stream:
        while (item := works.get()) is not None:
            work, token = item
            with suppress(Exception):  # the reader of the token gets the error from the Work
                work.wait()
            del work, item  # see HookExecution.end_collective
            tokens.put(token)
