"""Costs of collectives in Gloo and in NCCL.

N is the number of members, n the number of their nodes, and S the bytes of the tensor on each rank.

Note [Costs in Gloo]
~~~~~~~~~~~~~~~~~~~~
Over TCP, with the algorithms that PyTorch chooses, a rank sends these bytes in these numbers of
rounds:

    all_reduce       ring, reduce-scatter and all-gather    2·(N-1)/N·S    2·(N-1)
    reduce_scatter   an all-reduce whose result is sliced   2·(N-1)/N·S    2·(N-1)
    all_gather       ring                                   (N-1)·S        N-1
    all_to_all       a message to each other rank           (N-1)/N·S      1, of N-1 messages
    exchange, push   one message                            S              1
    broadcast        binomial tree, by its root             ⌈log2 N⌉·S     ⌈log2 N⌉
    vote             dissemination barrier                  nothing        ⌈log2 N⌉

Rings follow the order of ranks, so only the last rank of each node sends to another node. The
all-reduce also splits its message in two, and adds up one half while the other one travels.
Source: https://github.com/pytorch/gloo, gloo/{allreduce,allgather,alltoall,broadcast,barrier}.cc.

Note [Costs in NCCL]
~~~~~~~~~~~~~~~~~~~~
The latencies are those by which NCCL chooses between its algorithms,
https://github.com/NVIDIA/nccl, src/graph/tuning.cc, for NVLink inside nodes and InfiniBand between
them, in the protocols that win for small and for large messages. A rank sends these bytes over
these numbers of hops inside nodes and between nodes:

    all_reduce       ring    2·(N-1)/N·S     2·(N-n), 2·(n-1)
                  or tree    2·S / 0.9       2·(N/n-1), 2·log2 n        whichever takes less time
    reduce_scatter   ring    (N-1)/N·S       N-n, n-1
    all_gather       ring    (N-1)·S         N-n, n-1
    broadcast        ring    S               N-n, n-1
    all_to_all       pairs   (N-1)/N·S       a hop for every 8 peers, which are served together
    exchange, push   pairs   S               1

NCCL runs on the GPU: it takes no time of a CPU core here, and the GPU's own time is part of the
rates. Nothing of this has been measured, because no machine with two GPUs was available.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from commhooks.costs.network import Network
from commhooks.costs.step_trace import Collective

__all__ = ["NCCL", "Backend", "Cost", "Gloo"]

_RING_SECONDS, _RING_INNER, _RING_OUTER = 8.4e-6, 3.4e-6, 9.6e-6
_TREE_SECONDS, _TREE_INNER, _TREE_OUTER = 4.4e-6, 0.52e-6, 5.0e-6
_TREE_EFFICIENCY = 0.9
_PEERS_AT_ONCE = 8


@dataclass(frozen=True)
class Cost:
    """The cost of a collective for a rank: the latency, then the other parts at the same time."""

    latency_seconds: float
    link_bytes: float
    """Bytes that cross the link of the rank's node, those of parallel groups included."""
    node_bytes: float
    """Bytes that cross the rank's link inside the node."""
    cpu_seconds: float = 0.0


class Backend(Protocol):
    """A library of collectives, such as Gloo or NCCL."""

    @property
    def name(self) -> str:
        """The name that ``CommHook.backends`` uses."""
        ...

    @property
    def concurrent(self) -> int:
        """Number of collectives that one process group executes at the same time."""
        ...

    @property
    def has_stage_groups(self) -> bool:
        """Whether hooks get a process group per stage, and end a step with a vote.

        See commhooks/runtime/scheduler.py.
        """
        ...

    def cost(self, collective: Collective, network: Network) -> Cost:
        """Return the cost of one collective. Raises ValueError for an unknown operation."""
        ...


@dataclass(frozen=True)
class Gloo:
    """The rates of a machine, as :mod:`commhooks.lab.simulation.measurements` measures them."""

    round_seconds: float
    """From the start of a message until its receiver continues, without the network's latency."""
    message_cpu_seconds: float
    """The part of ``round_seconds`` in which a core is busy."""
    byte_cpu_seconds: float
    """The time to send one byte, receive one, and add it if the collective adds."""

    name: ClassVar[str] = "gloo"
    concurrent: ClassVar[int] = 2  # threads of PyTorch's process group
    has_stage_groups: ClassVar[bool] = True

    def cost(self, collective: Collective, network: Network) -> Cost:
        """See Note [Costs in Gloo]."""
        members = collective.members
        traffic = _traffic(
            collective.operation,
            collective.tensor_bytes,
            members.per_node,
            members.nodes(network.nodes),
        )
        waiting = max(0.0, self.round_seconds - self.message_cpu_seconds)
        return Cost(
            latency_seconds=(traffic.inner_rounds + traffic.outer_rounds) * waiting
            + traffic.inner_rounds * network.node_link.latency_seconds
            + traffic.outer_rounds * network.link.latency_seconds,
            link_bytes=traffic.link_bytes * members.parallel,
            node_bytes=traffic.node_bytes,
            cpu_seconds=traffic.messages * self.message_cpu_seconds
            + traffic.sent_bytes * self.byte_cpu_seconds,
        )


@dataclass(frozen=True)
class _Traffic:
    """``link_bytes`` are those of all members on a node; everything else is of one rank."""

    sent_bytes: float
    messages: float
    inner_rounds: float
    outer_rounds: float
    link_bytes: float
    node_bytes: float


def _traffic(operation: str, nbytes: float, per_node: int, nodes: int) -> _Traffic:
    size = per_node * nodes
    match operation:
        case "all_reduce" | "reduce_scatter":
            return _ring(nbytes / size, 2 * (size - 1), per_node, nodes)
        case "all_gather":
            return _ring(nbytes, size - 1, per_node, nodes)
        case "all_to_all":
            return _pairs(nbytes / size, size - 1, per_node, nodes)
        case "exchange" | "push":
            return _pairs(nbytes, 1, per_node, nodes)
        case "broadcast":
            return _tree(nbytes, per_node, nodes)
        case "vote":
            return _tree(0.0, per_node, nodes)
    raise ValueError(f"the cost of the collective {operation!r} is unknown")


def _ring(part_bytes: float, rounds: int, per_node: int, nodes: int) -> _Traffic:
    """Pass ``part_bytes`` on in every round; each part leaves every node once."""
    size = per_node * nodes
    sent = part_bytes * rounds
    outer_rounds = rounds * nodes / size if nodes > 1 else 0.0
    return _Traffic(
        sent_bytes=sent,
        messages=rounds,
        inner_rounds=rounds - outer_rounds,
        outer_rounds=outer_rounds,
        link_bytes=sent if nodes > 1 else 0.0,
        node_bytes=sent if per_node > 1 else 0.0,
    )


def _pairs(part_bytes: float, peers: int, per_node: int, nodes: int) -> _Traffic:
    """Send a part to each of ``peers`` peers at once.

    A single peer is assumed to be on another node.
    """
    outside = peers
    if peers > 1 or nodes == 1:
        outside = peers * (per_node * nodes - per_node) // (per_node * nodes - 1)
    return _Traffic(
        sent_bytes=part_bytes * peers,
        messages=peers,
        inner_rounds=1.0 if nodes == 1 else 0.0,
        outer_rounds=1.0 if nodes > 1 else 0.0,
        link_bytes=part_bytes * outside * per_node,
        node_bytes=part_bytes * (peers - outside),
    )


def _tree(nbytes: float, per_node: int, nodes: int) -> _Traffic:
    """Send ``nbytes`` down a binomial tree of nodes, and of the ranks in each node."""
    inner = math.ceil(math.log2(per_node))
    outer = math.ceil(math.log2(per_node * nodes)) - inner
    return _Traffic(
        sent_bytes=nbytes * (inner + outer),
        messages=inner + outer,
        inner_rounds=inner,
        outer_rounds=outer,
        link_bytes=nbytes * outer,
        node_bytes=nbytes * inner,
    )


@dataclass(frozen=True)
class NCCL:
    """NCCL with its own tuning table; it has no options."""

    name: ClassVar[str] = "nccl"
    concurrent: ClassVar[int] = 1  # the collectives of a communicator run one after the other
    has_stage_groups: ClassVar[bool] = False

    def cost(self, collective: Collective, network: Network) -> Cost:
        """See Note [Costs in NCCL]."""
        members = collective.members
        shape = _Shape(members.per_node, members.nodes(network.nodes), members.parallel, network)
        nbytes, size = collective.tensor_bytes, shape.size
        match collective.operation:
            case "all_reduce":
                ring = shape.ring(2 * (size - 1) / size * nbytes, passes=2)
                return min(ring, shape.tree(nbytes), key=shape.seconds)
            case "reduce_scatter":
                return shape.ring((size - 1) / size * nbytes)
            case "all_gather":
                return shape.ring((size - 1) * nbytes)
            case "broadcast":
                return shape.ring(nbytes)
            case "all_to_all":
                return shape.pairs((size - 1) / size * nbytes, size - 1)
            case "exchange" | "push":
                return shape.pairs(nbytes, 1)
        raise ValueError(f"the cost of the collective {collective.operation!r} is unknown")


@dataclass(frozen=True)
class _Shape:
    """The members of a collective, and the network between them."""

    per_node: int
    nodes: int
    parallel: int
    network: Network

    @property
    def size(self) -> int:
        return self.per_node * self.nodes

    def ring(self, sent: float, passes: int = 1) -> Cost:
        """Pass a message around all ranks in order, ``passes`` times."""
        inner, outer = passes * (self.size - self.nodes), passes * (self.nodes - 1)
        return self._cost(
            _RING_SECONDS + inner * _RING_INNER + outer * _RING_OUTER, inner, outer, sent
        )

    def tree(self, nbytes: float) -> Cost:
        """Send ``nbytes`` up and down a chain in each node and a tree of nodes."""
        inner, outer = 2 * (self.per_node - 1), 2 * math.ceil(math.log2(self.nodes))
        return self._cost(
            _TREE_SECONDS + inner * _TREE_INNER + outer * _TREE_OUTER,
            inner,
            outer,
            2 * nbytes / _TREE_EFFICIENCY,
        )

    def pairs(self, sent: float, peers: int) -> Cost:
        """Send to ``peers`` peers. A single peer is assumed to be on another node."""
        outside = 0.0
        if self.nodes > 1:
            outside = 1.0 if peers == 1 else (self.size - self.per_node) / (self.size - 1)
        hops = math.ceil(peers / _PEERS_AT_ONCE)
        hop = _RING_OUTER + self.network.link.latency_seconds if outside else _RING_INNER
        return Cost(
            latency_seconds=_RING_SECONDS + hops * hop,
            link_bytes=sent * outside * self.per_node * self.parallel,
            node_bytes=sent * (1 - outside),
        )

    def seconds(self, cost: Cost) -> float:
        """Return the time of a collective that has the network to itself."""
        return cost.latency_seconds + max(
            cost.link_bytes / self.network.link.bytes_per_second,
            cost.node_bytes / self.network.node_link.bytes_per_second,
        )

    def _cost(self, seconds: float, inner: int, outer: int, sent: float) -> Cost:
        wires = (
            inner * self.network.node_link.latency_seconds
            + outer * self.network.link.latency_seconds
        )
        return Cost(
            latency_seconds=seconds + wires,
            link_bytes=sent * self.parallel if self.nodes > 1 else 0.0,
            node_bytes=sent if self.per_node > 1 else 0.0,
        )
