"""Waiting for collectives, and Works that consist of several. See csrc/comm."""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["CompletionQueue", "join_works", "ring_gather"]

_AT_ONCE = timedelta(milliseconds=1)

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


class _Combined(ABC):
    """A Work that runs ``_run`` on the first thread that waits, and keeps its error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_completed = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._lock:
            if not self._is_completed:
                self._error = self._run(timeout)
                self._is_completed = True
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_completed

    @abstractmethod
    def _run(self, timeout: timedelta | None) -> Exception | None:
        """Wait for everything that is posted; return the first error."""


class _JoinedWork(_Combined):
    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def _run(self, timeout: timedelta | None) -> Exception | None:
        works, self._works = self._works, []
        return _first_error(works, timeout)


class _RingGather(_Combined):
    """An all-gather to the next rank: each passes on the part that it got in the round before."""

    def __init__(self, group: Any, parts: Sequence[Tensor]) -> None:
        super().__init__()
        self._group = group
        self._parts = list(parts)
        self._rank: int = group.rank()
        self._size: int = group.size()
        self._receives: list[Any] = []
        self._sends: list[Any] = []
        try:
            before = (self._rank - 1) % self._size
            for distance in range(1, self._size):
                self._receives.append(group.recv([self._part(distance)], before, distance))
            if self._size > 1:
                self._send(0)
        except Exception:
            self._run(_AT_ONCE)  # see Note [Nothing posted is dropped] in point_to_point.py
            raise

    def _run(self, timeout: timedelta | None) -> Exception | None:
        error: Exception | None = None
        for distance, receive in enumerate(self._receives, 1):
            ended = _first_error([receive], timeout)
            error = error or ended
            if error is None and distance + 1 < self._size:
                try:
                    self._send(distance)
                except Exception as raised:
                    error = raised.with_traceback(None)
        ended = _first_error(self._sends, timeout)
        self._group, self._parts, self._receives, self._sends = None, [], [], []
        return error or ended

    def _part(self, distance: int) -> Tensor:
        return self._parts[(self._rank - distance) % self._size]

    def _send(self, distance: int) -> None:
        after = (self._rank + 1) % self._size
        # The tag is the distance that the part will have traveled.
        self._sends.append(self._group.send([self._part(distance)], after, distance + 1))


def _first_error(works: Sequence[Any], timeout: timedelta | None) -> Exception | None:
    """Wait for all, even after an error: their tensors are in use until then."""
    first: Exception | None = None
    for work in works:
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        except Exception as error:
            first = first or error.with_traceback(None)
    return first


def join_works(works: Sequence[dist.Work]) -> Any:
    """Return one Work that completes when all have completed, with their first error."""
    return _JoinedWork(works)


def ring_gather(group: dist.ProcessGroup, parts: Sequence[Tensor]) -> Any:
    """Gather ``parts`` over a ring of the Gloo group; the part of this rank is the input."""
    return _RingGather(group, parts)
