"""What a rank does in one step, in numbers: its script, which the timeline plays.

::

    bucket 0   backward ──► local ──► collective ──► local ──► collective ──► local ──► unpack
    bucket 1            ──► local ──► collective ──► ...

Seconds are those of one rank that has its cores for itself; bytes are those of the tensor that each
rank gives to a collective. Both may be fractions, where they stand for a mean or an extrapolation.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from commhooks.comm import wire

__all__ = ["BucketScript", "Collective", "Members", "StepScript"]

_WIRE: Mapping[str, Callable[[Any, int], float]] = {
    "all_reduce": wire.all_reduce_bytes,
    "reduce_scatter": wire.reduce_scatter_bytes,
    "all_gather": wire.all_gather_bytes,
    "all_to_all": wire.all_to_all_bytes,
    "broadcast": lambda nbytes, size: wire.broadcast_bytes(nbytes, size, is_root=True),
    "exchange": lambda nbytes, size: nbytes if size > 1 else 0,
    "push": lambda nbytes, size: nbytes if size > 1 else 0,
}


@dataclass(frozen=True)
class Members:
    """Which ranks take part in a collective: so many on each node, of one node or of all."""

    per_node: int
    spans_nodes: bool

    @classmethod
    def of(cls, ranks: tuple[int, ...], size: int, ranks_per_node: int) -> "Members":
        """``ranks`` of ``size``, where node i has the i-th ``ranks_per_node``; empty: all."""
        chosen = ranks or tuple(range(size))
        nodes = len({rank // ranks_per_node for rank in chosen})
        return cls(len(chosen) // nodes, spans_nodes=nodes > 1)

    def nodes(self, nodes: int) -> int:
        """On how many nodes they are, out of ``nodes``."""
        return nodes if self.spans_nodes else 1


@dataclass(frozen=True)
class Collective:
    """One awaited collective: its name in :class:`Communicator`, and its bytes."""

    operation: str
    tensor_bytes: float
    members: Members

    @property
    def is_vote(self) -> bool:
        """Whether it ends the step: see Note [All ranks or none] in runtime/scheduler.py."""
        return self.operation == "vote"

    def wire_bytes(self, nodes: int) -> float:
        """What the communicator counts for rank 0, see :mod:`commhooks.comm.wire`."""
        size = self.members.per_node * self.members.nodes(nodes)
        return _WIRE[self.operation](self.tensor_bytes, size)


@dataclass(frozen=True)
class BucketScript:
    """What becomes of one bucket. ``local_seconds``: before, between and after the collectives."""

    gradient_bytes: int
    backward_seconds: float
    """From the bucket before it to this one's launch, gradients packed."""
    unpack_seconds: float
    local_seconds: tuple[float, ...]
    collectives: tuple[Collective, ...]

    @property
    def structure(self) -> tuple[tuple[str, bool], ...]:
        """What has to be the same for two scripts to be of one kind."""
        return tuple((c.operation, c.members.spans_nodes) for c in self.collectives)


@dataclass(frozen=True)
class StepScript:
    """A step with a hook. ``is_native``: it runs in the reducer, without a thread of its own."""

    buckets: tuple[BucketScript, ...]
    forward_seconds: float
    is_native: bool

    @property
    def backward_seconds(self) -> float:
        """Of backward alone, packing and unpacking included."""
        return sum(b.backward_seconds + b.unpack_seconds for b in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        return sum(bucket.gradient_bytes for bucket in self.buckets)

    def wire_bytes(self, nodes: int) -> float:
        """What rank 0 sends."""
        return sum(c.wire_bytes(nodes) for bucket in self.buckets for c in bucket.collectives)

    def faster(self, factor: float) -> "StepScript":
        """On a machine that computes ``factor`` times as fast."""
        buckets = tuple(
            replace(
                bucket,
                backward_seconds=bucket.backward_seconds / factor,
                unpack_seconds=bucket.unpack_seconds / factor,
                local_seconds=tuple(seconds / factor for seconds in bucket.local_seconds),
            )
            for bucket in self.buckets
        )
        return replace(self, buckets=buckets, forward_seconds=self.forward_seconds / factor)

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepScript":
        """What :meth:`to_json` gave."""
        return cls(
            tuple(_bucket(bucket) for bucket in data["buckets"]),
            data["forward_seconds"],
            data["is_native"],
        )


def _bucket(data: dict[str, Any]) -> BucketScript:
    collectives = tuple(
        Collective(**entry | {"members": Members(**entry["members"])})
        for entry in data["collectives"]
    )
    local = tuple(data["local_seconds"])
    return BucketScript(**data | {"local_seconds": local, "collectives": collectives})
