"""The process groups that the collectives of one hook use: one per stage and subgroup.

Note [Subgroups]
~~~~~~~~~~~~~~~~
A hook may communicate among some ranks only, for example those of a node. Each subgroup counts its
own stages and has a stage group for each, so ranks outside need not know about it. The rules of
Note [Order of collectives] in issue_order.py and Note [All ranks or none] in
runtime/step_scheduler.py hold in each subgroup separately:

    Bucket b issues its stage s in a subgroup after bucket b-1 has completed that stage there, or
    has finished.

Opening a stage group blocks until all of its ranks open it. Two ranks cannot wait for each other in
doing so. Suppose that one rank opens a stage group for bucket b, and the other one opens another
stage group for a later bucket, before b has reached the first one there. Then b is not finished on
the other rank. So by the rule it has already issued the stage that the later bucket is about to
issue, and that stage group is open already. This holds because a rank notices the end of a
collective whatever it waits for in other stage groups: see runtime/waiters.py.

A rank that fails closes the stage groups of all its subgroups. Their other ranks fail and do the
same. A rank that shares no subgroup with any of them learns of the failure in the vote, in which
all ranks take part.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from commhooks.comm.peer_watch import PeerWatch, ring_pairs
from commhooks.comm.threads import start_thread
from commhooks.errors import CommHookPeerError
from reducer.backends import backend_of
from reducer.peers import call_within, close_connections, is_peer_loss

StageKey = tuple[int, tuple[int, ...], int]
"""Names a stage group: the epoch, its ranks (all if empty), and the stage."""

_CPU = torch.device("cpu")

_POLL_SECONDS = 0.001  # between two looks for peers; doubles up to 16 times this


class StageGroups:
    """Gloo process groups, one per stage and subgroup, connected on first use.

    Gloo completes the collectives of one group in any order, so there is one group per stage: see
    Note [Order of collectives]. After a failure all groups are dropped: what peers have pending on
    them fails when every rank has dropped them, and the next ``epoch`` starts with new ones.

    Note [Meeting before connecting]: connecting blocks, for the whole timeout of the group if a
    peer has failed before it got there. Therefore ranks first meet in the store, where a failure is
    visible; its neighbors notice a peer that has ended. The first rank that sees all ranks there,
    or a failure, decides for all of them whether they connect. Otherwise, one rank could leave
    because it has seen a failure elsewhere, while another one, which came last, sees all ranks and
    connects.

    Note [One client per thread]: a client of the store that waits for a key, as Gloo does to
    connect, locks out all other threads that use it. Two models under one backward, and exchanges,
    connect on threads of their own. With a common client, one rank could wait in the groups of one
    model and keep those of the other one waiting, for which its peer waits. So each
    ``StageGroups`` has a client, which is one more connection to the store's host.

    Args:
        group: The model's process group.
        token: A number that is the same on all ranks and that no other ``StageGroups`` uses.
        device: Where the tensors are that the backend of ``group`` sends.
        purpose: What else tells these groups from others with the same token.
    """

    on_loss: Callable[[int], None] | None = None
    """Called on another thread when a rank is lost, with the epoch in which it was connected."""
    _threads = 1  # per group, because its collectives run one at a time

    def __init__(
        self,
        group: dist.ProcessGroup,
        token: int,
        device: torch.device = _CPU,
        *,
        purpose: str = "steps",
    ) -> None:
        self._backend: Any = backend_of(group, device)
        self._timeout: timedelta = self._backend.options._timeout  # noqa: SLF001
        self._group_store: Store = group.get_group_store()
        self._own_store: PrefixStore | None = None
        self._purpose = purpose
        self._prefix = f"commhooks/{token:x}/{purpose}"
        self._rank = group.rank()
        self._size = group.size()
        self.epoch = 0
        """The number of failures so far."""
        self._groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
        self._aborted: dict[StageKey, list[dist.ProcessGroup]] = {}  # one each, still in use
        self._watches: list[PeerWatch] = []
        self._lost: dict[tuple[int, ...], int] = {}
        """The last epoch in which one of these ranks has gone, or this one has failed."""
        self._closed = threading.Event()

    @property
    def _store(self) -> PrefixStore:
        """A client of these groups alone: Note [One client per thread]."""
        # Not a cached_property: until Python 3.12, one lock serves those of all instances, and a
        # thread whose clone() cannot reach the store would lock out the others for minutes.
        if self._own_store is None:
            self._own_store = PrefixStore(self._prefix, _clone(self._group_store))
        return self._own_store

    def connect(self, stages: Mapping[tuple[int, ...], int]) -> None:
        """Open the first stages of these ranks, as many as given. Errors as for :meth:`open`.

        With stages of all ranks, it returns only when all ranks have opened theirs. A rank that
        went on could close its connections, or end, while others still connect.
        """
        try:
            for ranks, count in stages.items():
                for stage in range(count):
                    self.open(stage, ranks)
            if () in stages:
                self._meet(0, "connected", tuple(range(self._size)))
        except BaseException as error:
            if self._own_store is not None:  # otherwise the store cannot be reached
                self.publish(str(error))  # or peers would wait for the whole timeout
            raise

    def open(self, stage: int, ranks: tuple[int, ...] = ()) -> dist.ProcessGroup:
        """Return the group of this stage among ``ranks``, by default all ranks.

        The first use of a stage connects it, which blocks until all of its ranks do so.

        Raises:
            CommHookPeerError: A peer has failed, or does not come within the timeout.
        """
        groups = self._groups.setdefault(ranks, [])
        while len(groups) <= stage:
            groups.append(self._connect(len(groups), ranks or tuple(range(self._size))))
        return groups[stage]

    def close_connections(self) -> None:
        """Close those of groups that were dropped in use. What is pending fails, or never ends."""
        for (group,) in self._aborted.values():
            close_connections(group)

    def _make_group(self, store: Store, ranks: tuple[int, ...]) -> Any:
        """Return a new group, which has a process group's methods for collectives."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        # One thread that serves the sockets of all groups wakes up less often than one per group.
        options._devices = self._backend.options._devices  # noqa: SLF001
        options._timeout = self._timeout  # noqa: SLF001
        options._threads = self._threads  # noqa: SLF001
        place = ranks.index(self._rank), len(ranks)
        # Gloo may wait forever for a peer that has left while they connect; then a thread does.
        seconds = self._timeout.total_seconds()
        return call_within(seconds, lambda: ProcessGroupGloo(store, *place, options))

    def publish(self, failure: str) -> None:
        """Tell peers why this epoch ends. Only the reason of the first rank is kept."""
        # The store may be gone with its rank. Peers see closed connections in any case.
        with suppress(RuntimeError):
            self._store.compare_set(self._key("failure"), "", failure)

    def published(self) -> str | None:
        """Return why this epoch ended, if a rank has published a reason."""
        with suppress(RuntimeError):
            if self._store.check([self._key("failure")]):
                return self._store.get(self._key("failure")).decode()
        return None

    def abort(self, used: Collection[StageKey] = ()) -> None:
        """Drop all groups and start the next epoch, as :meth:`disconnect` does. Does not block."""
        self.disconnect(used)
        self.epoch += 1

    def disconnect(self, used: Collection[StageKey] = ()) -> None:
        """Drop all groups within the epoch, in which none may be opened any more.

        Those that are still ``used`` are kept until :meth:`drop_unused` is called, so that
        :meth:`close_connections` can end what is pending there.
        """
        while self._watches:
            self._watches.pop().close()
        while self._groups:
            ranks, groups = self._groups.popitem()
            while groups:
                group = groups.pop()
                self._aborted[self.epoch, ranks, len(groups)] = [group]
                del group
        self.drop_unused(used)

    def drop_unused(self, used: Collection[StageKey]) -> None:
        """Drop the groups that were kept, except those that are still ``used``."""
        for key in self._aborted.keys() - set(used):
            # The destructor waits for pending collectives; no other reference may exist.
            start_thread("commhooks-drop", self._aborted.pop(key).clear)

    def close(self) -> None:
        """Make :meth:`open` raise, on whatever thread it is waiting."""
        self.on_loss = None  # whose owner keeps these groups, and would be kept by them
        self._closed.set()

    def _connect(self, stage: int, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        name = f"{stage} among {','.join(map(str, ranks))}"
        try:
            self._meet(stage, name, ranks)
            store = PrefixStore(self._key(name), self._store)
            group = self._make_group(store, ranks)
            if stage == 0 and (on_loss := self.on_loss) is not None:
                self._watch(on_loss, store, ranks)
            return cast("dist.ProcessGroup", group)
        except RuntimeError as error:
            if not is_peer_loss(error):
                raise
            broken = str(error)  # the error itself refers to frames, which may keep groups
        raise CommHookPeerError(
            f"[rank {self._rank}] the ranks of collective {stage} of a hook cannot meet: {broken}. "
            "A rank has ended, and its output tells why; or ranks cannot reach each other, and "
            "GLOO_SOCKET_IFNAME has to name the network interface that they share"
        )

    def _watch(self, on_loss: Callable[[int], None], store: Store, ranks: tuple[int, ...]) -> None:
        """Connect to the neighbors among ``ranks``: Note [Messages that never end]."""
        pairs = [
            self._make_group(PrefixStore(f"watch {pair}", store), pair)
            for pair in ring_pairs(self._rank, ranks)
        ]
        lose = functools.partial(self._lose, on_loss, ranks, self.epoch)
        self._watches.append(PeerWatch(pairs, lose))

    def _lose(self, on_loss: Callable[[int], None], ranks: tuple[int, ...], epoch: int) -> None:
        self._lost[ranks] = epoch
        on_loss(epoch)

    def _meet(self, stage: int, name: str, ranks: tuple[int, ...]) -> None:
        """Wait for ``ranks`` in the store: see Note [Meeting before connecting]."""
        keys = [self._key(f"{name}/rank {rank}") for rank in ranks]
        self._store.set(self._key(f"{name}/rank {self._rank}"), "here")
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _POLL_SECONDS
        while not (self._store.check(keys) or self.published() or self._lacks_one_of(ranks)):
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
            why = f"[rank {self._rank}] a rank has ended before collective {stage} of a hook"
            raise CommHookPeerError(self.published() or why)

    def _lacks_one_of(self, ranks: tuple[int, ...]) -> bool:
        """Return whether one of ``ranks`` has gone in this epoch, so that they never meet."""
        lost = self._lost.copy()  # threads add to it
        return any(set(ranks).issuperset(r) for r, epoch in lost.items() if epoch == self.epoch)

    def _key(self, name: str) -> str:
        return f"{self.epoch}/{name}"


def _clone(store: Store) -> Store:
    """Return another client of the store. A store that is written in Python may have no other."""
    try:
        return cast("Store", store.clone())  # type: ignore[attr-defined]
    except dist.DistError:
        raise
    except RuntimeError:
        return store
