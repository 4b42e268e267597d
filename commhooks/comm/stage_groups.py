"""The connections on which the collectives of one hook travel, one process group per stage.

Note [Subgroups]
~~~~~~~~~~~~~~~~
A hook may send among some ranks only, of a node for example. Each subgroup counts stages of its own
and has a channel for each, so ranks outside need not know of it, and the rules of Note [Order of
collectives] and Note [All ranks or none] hold in each subgroup by itself:

    bucket b issues its stage s in a subgroup once bucket b-1 has issued that, or has finished.

Opening a channel blocks until all of its ranks do so. Two ranks cannot wait for each other in that:
let one open a channel for bucket b, the other one for a later bucket, while b on the latter rank
has yet to come to the former's channel. Then b is not finished there, so the rule says that it has
issued what the later bucket is about to; the channel is open already.

What a failing rank gives up closes the channels of all its subgroups, whose other ranks fail and do
the same. Who shares none with any of them meets the failure in the vote, in which all take part.
"""

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

__all__ = ["StageGroups"]

_POLL_SECONDS = 0.001  # while peers are on their way; doubles up to 16 times that


class StageGroups:
    """Gloo process groups, one per stage and subgroup, made when first used.

    Gloo completes collectives of one group in any order, so they are told apart by group: see
    Note [Order of collectives]. After a failure all groups are given up: what peers have pending on
    them fails as soon as every rank has let go, and the next ``epoch`` starts with new ones.
    ``token`` is the same on all ranks and used by no other ``StageGroups``.

    Note [Meeting before connecting]: connecting blocks, for the group's whole timeout if a peer has
    failed on the way there. So ranks first meet in the store, where a failure can be seen. Whoever
    first sees all ranks there, or a failure, settles for all of them whether they connect: one that
    has seen a failure elsewhere must not leave while another one, who came last, sees all there.
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
        self._groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
        self._closed = threading.Event()

    def open(self, stage: int, ranks: tuple[int, ...] = ()) -> dist.ProcessGroup:
        """The channel of this stage among ``ranks``, by default all. They open 0, 1, 2... in order.

        Raises CommHookPeerError if a peer has failed, or does not come within the timeout.
        """
        groups = self._groups.setdefault(ranks, [])
        while len(groups) <= stage:
            groups.append(self._connect(len(groups), ranks or tuple(range(self._size))))
        return groups[stage]

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
            _, groups = self._groups.popitem()
            while groups:
                _drop([groups.pop()])  # no other reference may be left, here either

    def close(self) -> None:
        """Ends :meth:`open` in whatever thread it is waiting."""
        self._closed.set()

    def _connect(self, stage: int, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        name = f"{stage} among {','.join(map(str, ranks))}"
        self._meet(stage, name, ranks)
        store = PrefixStore(self._key(name), self._store)
        channel = ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), self._options)
        # A backend only, but with a process group's methods for collectives.
        return cast("dist.ProcessGroup", channel)

    def _meet(self, stage: int, name: str, ranks: tuple[int, ...]) -> None:
        """See Note [Meeting before connecting]."""
        keys = [self._key(f"{name}/rank {rank}") for rank in ranks]
        self._store.set(self._key(f"{name}/rank {self._rank}"), "here")
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _POLL_SECONDS
        while not self._store.check(keys) and not self.published():
            if self._closed.is_set() or time.monotonic() > deadline:
                late = [
                    rank
                    for rank, key in zip(ranks, keys, strict=True)
                    if not self._store.check([key])
                ]
                raise CommHookPeerError(
                    f"[rank {self._rank}] ranks {late} did not come to collective {stage} of a "
                    f"hook within {self._timeout.total_seconds():.0f} s; do all ranks run the same "
                    "number of steps, with the same collectives in the hook?"
                )
            time.sleep(pause)
            pause = min(2 * pause, 16 * _POLL_SECONDS)
        found = "complete" if self._store.check(keys) else "broken up"
        settled = self._store.compare_set(self._key(f"{name}/meeting"), "", found)
        if settled != b"complete":
            raise CommHookPeerError(self.published())

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
