"""The process groups of a hook on a backend that completes collectives in order.

Note [Failures on NCCL]
~~~~~~~~~~~~~~~~~~~~~~~
The host does not wait for collectives of NCCL, so the vote of Note [All ranks or none] in
runtime/scheduler.py is not possible. A rank whose hook fails has enqueued less than its peers,
whose devices then wait for it. Nothing tells them: a peer on the same machine does not see that a
communicator was aborted elsewhere. Therefore

    1. a hook has communicators of its own, beside those of the model's process group;
    2. a rank whose hook fails publishes the reason in the store and aborts its communicators;
    3. a thread on each of the other ranks looks for the reason, twice a second, and aborts the
       communicators there. What is enqueued on them ends, with wrong numbers;
    4. from then on the hook fails on all ranks, in the backward that comes next. It does not
       recover, because ranks may have updated parameters with wrong numbers. After all ranks have
       loaded a checkpoint, ``handle.replace()`` connects new communicators.

A rank that dies cannot publish. Then NCCL's time-out ends the collectives: see docs/gpu.md.
"""

import atexit
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from commhooks.comm.stage_groups import StageGroups, _drop
from commhooks.errors import CommHookError, CommHookPeerError

__all__ = ["StreamGroups", "options_like"]

_WATCH_SECONDS = 0.5


class StreamGroups(StageGroups):
    """Process groups of the model's backend, one per subgroup, connected on first use.

    One stage suffices, because the backend keeps the order. See Note [Failures on NCCL].
    """

    def __init__(
        self, group: dist.ProcessGroup, token: int, device: torch.device, *, purpose: str = "steps"
    ) -> None:
        super().__init__(group, token, device, purpose=purpose)
        self._lock = threading.RLock()
        self._failure: CommHookError | None = None
        self._watcher: threading.Thread | None = None

    def open(self, stage: int, ranks: tuple[int, ...] = ()) -> dist.ProcessGroup:
        """Return the group of ``ranks``, by default all ranks.

        Raises:
            CommHookPeerError: A peer has failed, or does not come within the timeout.
            CommHookError: The hook has failed on this rank before.
        """
        with self._lock:
            self.check()
            group = super().open(stage, ranks)
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=_watch,
                    args=(weakref.ref(self), self._closed),
                    name="commhooks-watch",
                    daemon=True,
                )
                self._watcher.start()
                _all.add(self)
            return group

    def check(self) -> None:
        """Raise the error of an earlier step, if the hook has failed."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def fail(self, error: CommHookError) -> None:
        """End the hook on all ranks, because of ``error`` on this one."""
        self.publish(str(error))
        kind = CommHookPeerError if isinstance(error, CommHookPeerError) else CommHookError
        self._end(kind(f"[rank {self._rank}] the hook failed in an earlier step: {error}. {_DO}"))

    def fail_as_published(self) -> bool:
        """End the hook on this rank if it has failed on another one. Return whether it has."""
        reason = self.published()
        if reason is not None:
            self._end(
                CommHookPeerError(f"[rank {self._rank}] another rank failed: {reason}. {_DO}")
            )
        return reason is not None

    def is_over(self) -> bool:
        """Return whether there is nothing to watch any more, after ending what has failed."""
        try:
            has_failed = self._store.check([self._key("failure")])
        except RuntimeError:
            return True  # the store has gone with its rank, so nobody can publish
        return has_failed and self.fail_as_published()

    def close(self) -> None:
        """Drop the groups. The watching thread ends."""
        if not self.fail_as_published():  # while this rank may wait for the one that failed
            self.abandon()
        super().close()

    def join(self, timeout: float) -> None:
        """Wait for the watching thread, which :meth:`close` ends."""
        if self._watcher is not None:
            self._watcher.join(timeout)

    def _end(self, failure: CommHookError) -> None:
        with self._lock:
            self._failure = self._failure or failure
            aborted = [group for groups in self._groups.values() for group in groups]
            self._groups.clear()
        while aborted:
            aborted[-1].abort()
            _drop([aborted.pop()])

    def _make_options(self) -> Any:
        return options_like(self._backend.options)

    def _make_group(self, store: Store, rank: int, size: int) -> Any:
        return type(self._backend)(store, rank, size, self._options)


_DO = (
    "Its average is not the same on all ranks: load a checkpoint on all of them, then register the "
    "hook again with replace() of its handle, or restart"
)


_KEPT = ("_timeout", "_devices", "_threads", "is_high_priority_stream", "config")


def options_like(options: Any) -> Any:
    """Return options of a new process group with the time-out and the limits of another.

    ``split_from`` and ``split_color`` are left out. NCCL would make the new communicator by a
    collective of all ranks of the parent, and of members that the parent's color chooses.
    """
    found = type(options)()
    for name in _KEPT:
        if hasattr(options, name):
            setattr(found, name, getattr(options, name))
    return found


def _watch(reference: weakref.ref[StreamGroups], closed: threading.Event) -> None:
    """Look for a failure of another rank until there is one, or the groups are not in use."""
    while not closed.wait(_WATCH_SECONDS):
        groups = reference()
        if groups is None or groups.is_over():
            return
        del groups


_all: weakref.WeakSet[StreamGroups] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread that returns from C++ while the interpreter shuts down would crash it.
    for groups in list(_all):
        groups._closed.set()  # noqa: SLF001
    for groups in list(_all):
        groups.join(2.0)
