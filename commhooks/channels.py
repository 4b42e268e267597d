"""The connections on which the collectives of one hook travel, one process group per stage."""

import atexit
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from commhooks.errors import CommHookPeerError

__all__ = ["Channels"]

_POLL_SECONDS = 0.001  # while peers are on their way; doubles up to 16 times that


class Channels:
    """Gloo process groups, one per stage, made when a stage is first used.

    Gloo completes collectives of one group in any order, so they are told apart by group: see
    Note [Order of collectives]. After a failure all groups are given up: what peers have pending on
    them fails as soon as every rank has let go, and the next ``epoch`` starts with new ones.
    ``token`` is the same on all ranks and used by no other ``Channels``.

    Note [Meeting before connecting]: connecting blocks, for the group's whole timeout if a peer has
    failed on the way there. So ranks first meet in the store, where a failure can be seen.
    """

    def __init__(self, group: dist.ProcessGroup, token: int) -> None:
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001
        self._timeout: timedelta = backend.options._timeout  # noqa: SLF001
        # One thread that serves the sockets of all channels is woken up less often than one each;
        # and one that runs collectives suffices, as those of a channel go one after the other.
        self._options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        self._options._devices = backend.options._devices  # type: ignore[attr-defined]  # noqa: SLF001
        self._options._timeout = self._timeout  # noqa: SLF001
        self._options._threads = 1  # noqa: SLF001
        self._store = PrefixStore(f"commhooks/{token:x}", group.get_group_store())
        self._rank = group.rank()
        self._size = group.size()
        self._epoch = 0
        self._groups: list[dist.ProcessGroup] = []
        self._closed = threading.Event()

    def open(self, stage: int) -> dist.ProcessGroup:
        """The channel of this stage. All ranks open stages in the same order: 0, 1, 2...

        Raises CommHookPeerError if a peer has failed, or does not come within the timeout.
        """
        while len(self._groups) <= stage:
            self._groups.append(self._connect(len(self._groups)))
        return self._groups[stage]

    def publish(self, failure: str) -> None:
        """Tells peers why this epoch ends; the first rank to do so is heard."""
        # The store may be gone with the rank that kept it; peers see closed connections anyway.
        with suppress(RuntimeError):
            self._store.compare_set(self._key("failure"), "", failure)

    def published(self) -> str | None:
        """Why this epoch ended, if a rank has said so."""
        with suppress(RuntimeError):
            if self._store.check([self._key("failure")]):
                return self._store.get(self._key("failure")).decode()
        return None

    def abandon(self) -> None:
        """Gives up all connections and starts the next epoch. Does not block."""
        self._epoch += 1
        while self._groups:
            _drop([self._groups.pop()])  # no other reference may be left, here either

    def close(self) -> None:
        """Ends :meth:`open` in whatever thread it is waiting."""
        self._closed.set()

    def _connect(self, stage: int) -> dist.ProcessGroup:
        self._meet(stage)
        store = PrefixStore(self._key(str(stage)), self._store)
        channel = ProcessGroupGloo(store, self._rank, self._size, self._options)
        # A backend only, but with a process group's methods for collectives.
        return cast("dist.ProcessGroup", channel)

    def _meet(self, stage: int) -> None:
        """See Note [Meeting before connecting]."""
        keys = [self._key(f"{stage}/rank {rank}") for rank in range(self._size)]
        self._store.set(keys[self._rank], "here")
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _POLL_SECONDS
        while not self._store.check(keys):
            if failure := self.published():
                raise CommHookPeerError(failure)
            if self._closed.is_set() or time.monotonic() > deadline:
                late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise CommHookPeerError(
                    f"[rank {self._rank}] ranks {late} did not come to collective {stage} of a "
                    f"hook within {self._timeout.total_seconds():.0f} s; do all ranks run the same "
                    "number of steps, with the same collectives in the hook?"
                )
            time.sleep(pause)
            pause = min(2 * pause, 16 * _POLL_SECONDS)

    def _key(self, name: str) -> str:
        return f"{self._epoch}/{name}"


_droppers: set[threading.Thread] = set()


def _drop(references: list[Any]) -> None:
    """Drops the last reference to a process group, whose destructor waits for what is pending."""
    thread = threading.Thread(target=references.clear, name="commhooks-drop", daemon=True)
    _droppers.difference_update([other for other in _droppers if not other.is_alive()])
    _droppers.add(thread)
    thread.start()


@atexit.register
def _join_droppers() -> None:
    # A thread that comes back from C++ while the interpreter goes down would crash it.
    for thread in list(_droppers):
        thread.join(2.0)
