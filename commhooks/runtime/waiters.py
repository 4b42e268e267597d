"""Threads that wait for the collectives of a hook."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from torch._C._distributed_c10d import Work

from commhooks.comm.stage_groups import StageKey
from commhooks.comm.threads import abandon_thread, start_thread
from commhooks.runtime.side_stream import SideStream

Inbox = SimpleQueue[StageKey | Callable[[], object]]
"""What a thread that runs a hook has to do: continue after a collective, or call a function."""

_Works = SimpleQueue[Work | None]


class Waiters:
    """One thread per stage group, which waits for its Works in the order in which they began.

    With one thread for several stage groups, a Work of a later bucket, which a peer issues only
    after an earlier one, could hide that the earlier one has completed. A callback of a Work would
    run Python on a thread of the backend, which must not wait for the GIL; and point-to-point Works
    of Gloo have no callbacks. Some Work may never complete. So as long as a thread waits, it refers
    to nothing but the Work, the key of the stage group, the inbox and the stream.

    Args:
        stream: What to wait on: Works of CUDA tensors make the current stream wait.
    """

    def __init__(self, stream: SideStream) -> None:
        self.inbox: Inbox = SimpleQueue()
        self._stream = stream
        self._waiters: dict[StageKey, tuple[_Works, threading.Thread]] = {}

    def watch(self, key: StageKey, work: Work) -> None:
        """Put ``key`` into the inbox when ``work`` has completed, with or without an error."""
        if key not in self._waiters:
            works: _Works = SimpleQueue()
            thread = start_thread("commhooks-wait", _wait, key, works, self.inbox, self._stream)
            self._waiters[key] = works, thread
        self._waiters[key][0].put(work)

    def end_epoch(self, epoch: int) -> None:
        """End the threads of this epoch, or abandon those that never return from a Work."""
        for key in [key for key in self._waiters if key[0] == epoch]:
            works, thread = self._waiters.pop(key)
            works.put(None)
            abandon_thread(thread)

    def close(self) -> None:
        """End the threads, after what they wait for."""
        for works, _ in self._waiters.values():
            works.put(None)


def _wait(key: StageKey, works: _Works, inbox: Inbox, stream: SideStream) -> None:
    with stream:
        while (work := works.get()) is not None:
            with suppress(Exception):  # who gets the key gets the error from the Work
                work.wait()
            del work  # see HookExecution.end_collective
            inbox.put(key)
