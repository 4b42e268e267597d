"""Threads joined at interpreter exit."""

import atexit
import threading
from collections.abc import Callable
from typing import Any

_SECONDS = 2.0  # for each thread


class _Thread(threading.Thread):
    is_awaited = True


def start_thread(name: str, function: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon for which the interpreter waits at its end, two seconds at most.

    A thread that returned from C++ or woke up while the interpreter shuts down would crash it.
    """
    thread = _Thread(target=function, args=args, name=name, daemon=True)
    thread.start()
    return thread


def abandon_thread(thread: threading.Thread) -> None:
    """Never join this thread, which may never end."""
    thread.is_awaited = False  # type: ignore[attr-defined]


@atexit.register
def _join_threads() -> None:
    joined: set[threading.Thread] = set()
    while left := _awaited() - joined:  # those that end may have started others
        for thread in left:
            thread.join(_SECONDS)
        joined |= left


def _awaited() -> set[threading.Thread]:
    """Return the threads to wait for, without one that is being started: it cannot be joined yet.

    The thread that starts it is among them, or is the one that calls this.
    """
    threads = (each for each in threading.enumerate() if isinstance(each, _Thread))
    return {each for each in threads if each.is_awaited and each.is_alive()}
