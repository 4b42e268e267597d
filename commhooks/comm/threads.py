"""Threads that the end of the interpreter waits for."""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

_SECONDS = 2.0  # for each thread

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(name: str, function: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon for which the interpreter waits at its end, two seconds at most.

    A thread that returned from C++ or woke up while the interpreter shuts down would crash it.
    """
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def leave_thread(thread: threading.Thread) -> None:
    """Do not wait for a thread that may never end."""
    _threads.discard(thread)


@atexit.register
def _join_threads() -> None:
    joined: set[threading.Thread] = set()
    while left := set(_threads) - joined:  # those that end may have started others
        for thread in left:
            thread.join(_SECONDS)
        joined |= left
