"""A queue that waits for collectives. See csrc/comm."""

import queue
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch.distributed as dist

Tokens = queue.SimpleQueue[int]
Works = queue.SimpleQueue[tuple[Any, int] | None]


class CompletionQueue:
    """A queue of integer tokens on which one thread can wait for many collectives.

    A thread per stage waits for its Works. A callback of a Work would run Python on a thread of the
    backend, which must not wait for the GIL.
    """

    def __init__(self) -> None:
        self._tokens: Tokens = queue.SimpleQueue()
        self._stages: dict[int, Works] = {}
        weakref.finalize(self, _end, self._stages).atexit = False

    def put(self, token: int) -> None:
        """Append ``token``."""
        self._tokens.put(token)

    def watch(self, work: dist.Work, token: int, stage: int = 0) -> None:
        """Append ``token`` once ``work`` has completed, with or without an error."""
        if stage not in self._stages:
            self._stages[stage] = self._start_thread()
        self._stages[stage].put((work, token))

    def forget(self) -> None:
        """Let new threads wait for what no thread waits for yet; some Work may never complete."""
        for stage, former in self._stages.items():
            works = self._start_thread()
            with suppress(queue.Empty):
                while True:
                    works.put(former.get_nowait())
            former.put(None)
            self._stages[stage] = works

    def _start_thread(self) -> Works:
        works: Works = queue.SimpleQueue()
        # A daemon, because a Work may never complete.
        threading.Thread(
            target=_wait, args=(works, self._tokens), name="commhooks-wait", daemon=True
        ).start()
        return works

    def get(self, timeout_seconds: float | None = None) -> int | None:
        """Remove and return the oldest token; None after ``timeout_seconds``."""
        try:
            return self._tokens.get(timeout=timeout_seconds)
        except queue.Empty:
            return None


def _wait(works: Works, tokens: Tokens) -> None:
    while (item := works.get()) is not None:
        work, token = item
        with suppress(Exception):  # the reader of the token gets the error from the Work
            work.wait()
        del work, item  # see HookExecution.end_collective
        tokens.put(token)


def _end(stages: dict[int, Works]) -> None:
    for works in stages.values():
        works.put(None)
