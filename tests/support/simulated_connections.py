"""The store and the process groups of simulated ranks: see :mod:`support.simulated_steps`.

The connections are strict. The n-th collectives that the ranks of a group post on it belong
together, and must be of the same bucket, stage and step. A rank that is constructed as a member of
a group waits for the others. A rank that drops a group closes its connections when nothing of its
own is pending there, and what the other ranks have pending then fails. In a group of three or more,
no member may post a collective while another one of its own is pending.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Actor(Protocol):
    """A thread of a rank."""

    completed: list[int]
    """Tokens of collectives that have completed."""


class World(Protocol):
    """What the ranks share, and what decides which of them runs."""

    @property
    def current(self) -> Actor: ...

    values: dict[str, bytes]
    connections: dict[str, "Connection"]
    votes: int

    def change(self) -> None: ...
    def yield_(self) -> None: ...
    def wait(self, timeout: object = None) -> None: ...
    def report(self, misuse: str) -> None: ...


class Store:
    """A store, or a part of it, whose keys begin with a prefix."""

    def __init__(self, prefix: str, store: Any) -> None:
        is_part = isinstance(store, Store)
        self.prefix = f"{store.prefix}/{prefix}" if is_part else prefix
        self.world: World = store.world if is_part else store

    def clone(self) -> "Store":
        return self

    def set(self, key: str, value: str) -> None:
        self.world.yield_()
        self.world.values[self._key(key)] = value.encode()
        self.world.change()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.world.yield_()
        if self.world.values.get(self._key(key), b"") == expected.encode():
            self.world.values[self._key(key)] = desired.encode()
            self.world.change()
        return self.world.values[self._key(key)]

    def check(self, keys: list[str]) -> bool:
        self.world.yield_()
        return all(self._key(key) in self.world.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.world.values[self._key(key)]

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"


class Work:
    """A collective that a rank has posted. ``tensor`` is a tag and a value; None for a barrier."""

    def __init__(self, actor: Actor, tensor: Tensor | None) -> None:
        self.actor, self.tensor = actor, tensor
        self.tag: list[float] = [] if tensor is None else tensor[:-1].tolist()
        self.then: Callable[[], None] | None = None
        self.is_over = self.has_failed = False

    def end(self, *, has_failed: bool) -> None:
        self.is_over, self.has_failed = True, has_failed
        if self.then is not None:
            self.actor.completed.append(self.then)

    def wait(self, timeout: object = None) -> None:
        assert self.is_over
        if self.has_failed:
            raise RuntimeError("connection closed")


class Connection:
    """What the members of one process group have posted, and who has left."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.members: set[int] = set()
        self.posted: dict[int, list[Work]] = defaultdict(list)
        self.completed = 0
        self.leaving: set[int] = set()
        self.closed: set[int] = set()

    def post(self, member: int, size: int, work: Work) -> None:
        if size > 2 and self._pending(member):
            self.world.report(f"rank {member} has two collectives in one group: {work.tag}")
        self.posted[member].append(work)
        if self.closed:
            work.end(has_failed=True)
            return
        while all(len(self.posted[i]) > self.completed for i in range(size)):
            works = [self.posted[i][self.completed] for i in range(size)]
            self.completed += 1
            self._combine(works)
        self._close()

    def _combine(self, works: list[Work]) -> None:
        if any(work.tag != works[0].tag for work in works):
            self.world.report(f"mixed up: {[work.tag for work in works]}")
        tensors = [work.tensor for work in works if work.tensor is not None]
        self.world.votes += not tensors
        total = sum(float(tensor[-1]) for tensor in tensors)
        for tensor in tensors:
            tensor[-1] = total
        for work in works:
            work.end(has_failed=False)

    def leave(self, member: int) -> None:
        self.leaving.add(member)
        self._close()

    def _close(self) -> None:
        """Close the connections of those that leave and have nothing pending."""
        while ready := [m for m in self.leaving - self.closed if not self._pending(m)]:
            self.closed.update(ready)
            for other in list(self.posted):
                for work in self._pending(other):
                    work.end(has_failed=True)

    def _pending(self, member: int) -> list[Work]:
        return [work for work in self.posted[member] if not work.is_over]


class Group:
    """A simulated ProcessGroupGloo. To construct one blocks until all of its members do."""

    def __init__(self, world: World, store: Store, member: int, size: int, options: Any) -> None:
        self.world, self.member, self.size = world, member, size
        self.actor = world.current
        self.connection = world.connections[store.prefix]
        if member in self.connection.members:
            world.report(f"{store.prefix}: rank {member} connects twice")
        self.connection.members.add(member)
        world.change()
        while len(self.connection.members) < size:
            world.wait()
        del options

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:
        return self._post(tensors[0])

    def barrier(self) -> Work:
        return self._post(None)

    def drop(self) -> None:
        self.connection.leave(self.member)

    def _post(self, tensor: Tensor | None) -> Work:
        work = Work(self.actor, tensor)
        self.connection.post(self.member, self.size, work)
        return work
