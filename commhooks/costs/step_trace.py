"""The work of one rank in one step, in numbers. The timeline replays such a trace on a network.

::

    bucket 0   backward ──► local ──► collective ──► local ──► collective ──► local ──► unpack
    bucket 1            ──► local ──► collective ──► ...

Seconds are those of a rank that has its cores to itself. Bytes are those of the tensor that each
rank passes to a collective. Both may be fractions, because they may be means or extrapolations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from commhooks.comm import wire

_WIRE_BYTES: Mapping[str, Callable[[Any, int], float]] = {
    "all_reduce": wire.all_reduce_bytes,
    "reduce_scatter": wire.reduce_scatter_bytes,
    "all_gather": wire.all_gather_bytes,
    "all_to_all": wire.all_to_all_bytes,
    "broadcast": lambda nbytes, size: wire.broadcast_bytes(nbytes, size, is_root=True),
    "sendrecv": lambda nbytes, size: nbytes if size > 1 else 0,
    "push": lambda nbytes, size: nbytes if size > 1 else 0,
}


@dataclass(frozen=True)
class Members:
    """The ranks that take part in a collective: ``per_node`` ranks on one node or on every node.

    ``parallel`` such groups, of other ranks of the same nodes, do the same at the same time.
    """

    per_node: int
    spans_nodes: bool
    parallel: int = 1

    @classmethod
    def of(
        cls, ranks: tuple[int, ...], size: int, ranks_per_node: int, parallel: int = 1
    ) -> "Members":
        """Describe ``ranks`` out of ``size`` ranks; an empty tuple stands for all of them.

        Ranks are numbered node by node, ``ranks_per_node`` on each.
        """
        chosen = ranks or tuple(range(size))
        nodes = len({rank // ranks_per_node for rank in chosen})
        return cls(len(chosen) // nodes, spans_nodes=nodes > 1, parallel=parallel)

    def nodes(self, nodes: int) -> int:
        """Return how many of ``nodes`` nodes the members are on."""
        return nodes if self.spans_nodes else 1


@dataclass(frozen=True)
class Collective:
    """One awaited collective: the name of its method of :class:`Communicator`, and its bytes."""

    operation: str
    tensor_bytes: float
    members: Members

    @property
    def is_vote(self) -> bool:
        """Whether it ends the step, see Note [All ranks or none] in runtime/step_scheduler.py."""
        return self.operation == "vote"

    def wire_bytes(self, nodes: int) -> float:
        """Return the bytes that rank 0 sends, counted as in :mod:`commhooks.comm.wire`."""
        size = self.members.per_node * self.members.nodes(nodes)
        return _WIRE_BYTES[self.operation](self.tensor_bytes, size)


@dataclass(frozen=True)
class BucketTrace:
    """The work on one bucket, or in an exchange of it. Without a hook by default.

    ``local_seconds`` has the hook's own work before, between and after ``collectives``, so it has
    one more element.
    """

    gradient_bytes: int
    backward_seconds: float
    """From the launch of the previous bucket to the launch of this one, packing included."""
    unpack_seconds: float
    local_seconds: tuple[float, ...] = (0.0,)
    collectives: tuple[Collective, ...] = ()
    exchanges: tuple["BucketTrace", ...] = ()
    """Exchanges begun after the step: Note [Exchanges between steps] in comm/exchange.py."""
    steps: int = 0
    """The number of steps until the result is awaited, if this is an exchange."""

    @property
    def structure(self) -> tuple[tuple[tuple[str, bool], ...], ...]:
        """Operations and whether their members span nodes; equal in all traces that are merged."""
        return tuple(
            tuple((c.operation, c.members.spans_nodes) for c in collectives)
            for collectives in (self.collectives, *(e.collectives for e in self.exchanges))
        )


@dataclass(frozen=True)
class StepTrace:
    """A step with a hook. A native hook runs in the reducer and needs no thread of its own."""

    buckets: tuple[BucketTrace, ...]
    forward_seconds: float
    is_native: bool

    @property
    def backward_seconds(self) -> float:
        """The time of backward alone, packing and unpacking included."""
        return sum(b.backward_seconds + b.unpack_seconds for b in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        return sum(bucket.gradient_bytes for bucket in self.buckets)

    def wire_bytes(self, nodes: int) -> float:
        """Return the bytes that rank 0 sends."""
        every = (*self.buckets, *self.exchanges)
        return sum(c.wire_bytes(nodes) for bucket in every for c in bucket.collectives)

    @property
    def exchanges(self) -> tuple[BucketTrace, ...]:
        """The exchanges that begin in this step."""
        return tuple(exchange for bucket in self.buckets for exchange in bucket.exchanges)

    def faster(self, factor: float) -> "StepTrace":
        """Return the trace of a machine that computes ``factor`` times as fast."""
        buckets = tuple(
            replace(
                merged_work([bucket], lambda seconds: seconds[0] / factor),
                backward_seconds=bucket.backward_seconds / factor,
                unpack_seconds=bucket.unpack_seconds / factor,
            )
            for bucket in self.buckets
        )
        return replace(self, buckets=buckets, forward_seconds=self.forward_seconds / factor)


class Work(Protocol):
    """A dataclass of local work and collectives."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def local_seconds(self) -> tuple[float, ...]: ...
    @property
    def collectives(self) -> tuple[Collective, ...]: ...


_Work = TypeVar("_Work", bound=Work)


def merged_work(
    parts: Sequence[_Work],
    seconds: Callable[[Sequence[float]], float],
    nbytes: Callable[[Sequence[float]], float] = lambda known: known[0],
) -> _Work:
    """Merge work of one structure: ``seconds`` of local work, and ``nbytes`` of tensors.

    Both get the numbers of all parts; exchanges are merged as well. Everything else is that of the
    first part.
    """
    found = replace(
        parts[0],
        local_seconds=tuple(map(seconds, zip(*(p.local_seconds for p in parts), strict=True))),
        collectives=tuple(
            replace(each[0], tensor_bytes=nbytes([c.tensor_bytes for c in each]))
            for each in zip(*(part.collectives for part in parts), strict=True)
        ),
    )
    begun = zip(*(getattr(part, "exchanges", ()) for part in parts), strict=True)
    exchanges = tuple(merged_work(each, seconds, nbytes) for each in begun)
    return replace(found, exchanges=exchanges) if exchanges else found
