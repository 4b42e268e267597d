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
    sendrecv, push   one message                            S              1
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
    sendrecv, push   pairs   S               1

NCCL runs on the GPU: it takes no time of a CPU core here, and the GPU's own time is part of the
rates. Nothing of this has been measured, because no machine with two GPUs was available.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from commhooks.costs.network import Network
from commhooks.costs.step_trace import Collective, Members

_RING, _TREE = (3.4e-6, 9.6e-6, 8.4e-6), (0.52e-6, 5.0e-6, 4.4e-6)
"""Seconds of a hop inside a node, of one between nodes, and before the first hop."""
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

    def seconds_alone(self, network: Network) -> float:
        """Return the time of a collective that shares nothing with others."""
        return self.latency_seconds + max(
            self.link_bytes / network.link.bytes_per_second,
            self.node_bytes / network.node_link.bytes_per_second,
            self.cpu_seconds,
        )


@dataclass(frozen=True)
class _Route:
    """The members of a collective, and the seconds of a hop besides the latency of its link."""

    members: Members
    network: Network
    inner_seconds: float
    """Of a hop inside a node."""
    outer_seconds: float
    start_seconds: float = 0.0
    """Before the first hop."""

    @property
    def nodes(self) -> int:
        return self.members.nodes(self.network.nodes)

    @property
    def size(self) -> int:
        return self.members.per_node * self.nodes

    def cost(
        self, inner: float, outer: float, link_bytes: float, node_bytes: float, cpu: float = 0.0
    ) -> Cost:
        """Return the cost of a chain of so many hops inside and between nodes.

        ``link_bytes`` are those of all members on a node; everything else is of one rank.
        """
        inner *= self.inner_seconds + self.network.node_link.latency_seconds
        outer *= self.outer_seconds + self.network.link.latency_seconds
        latency = self.start_seconds + (inner + outer)
        return Cost(latency, link_bytes * self.members.parallel, node_bytes, cpu)

    def chain(self, sent: float, inner: float, outer: float, cpu: float = 0.0) -> Cost:
        """Pass all bytes on from neighbor to neighbor, over each link of a node once."""
        link_bytes = sent if self.nodes > 1 else 0.0
        node_bytes = sent if self.members.per_node > 1 else 0.0
        return self.cost(inner, outer, link_bytes, node_bytes, cpu)

    def pairs(self, sent: float, peers: int, hops: int = 1, cpu: float = 0.0) -> Cost:
        """Send an equal part to each of ``peers`` peers.

        A single peer is assumed to be on another node.
        """
        per_node, outside = self.members.per_node, 0.0
        if self.nodes > 1:
            outside = 1.0 if peers == 1 else (self.size - per_node) / (self.size - 1)
        inner, outer = (0, hops) if outside else (hops, 0)
        return self.cost(inner, outer, sent * outside * per_node, sent * (1 - outside), cpu)


@dataclass(frozen=True)
class Gloo:
    """Gloo, with the rates of a machine: Note [Costs in Gloo].

    :mod:`commhooks.lab.simulation.measurements` measures them.
    """

    round_seconds: float
    """From the start of a message until its receiver continues, without the network's latency."""
    message_cpu_seconds: float
    """The part of ``round_seconds`` in which a core is busy."""
    byte_cpu_seconds: float
    """The time to send one byte, receive one, and add it if the collective adds."""

    name: ClassVar[str] = "gloo"
    """The name that ``CommHook.backends`` uses."""
    concurrent: ClassVar[int] = 2  # threads of PyTorch's process group
    """Number of collectives that one process group executes at the same time."""
    has_stage_groups: ClassVar[bool] = True
    """Whether hooks get a process group per stage, and vote: runtime/step_scheduler.py."""

    def cost(self, collective: Collective, network: Network) -> Cost:
        """Return the cost of a collective. Raises ValueError for an unknown operation."""
        waiting = max(0.0, self.round_seconds - self.message_cpu_seconds)
        route = _Route(collective.members, network, waiting, waiting)
        nbytes, size = collective.tensor_bytes, route.size

        def busy(messages: float, sent: float) -> float:
            return messages * self.message_cpu_seconds + sent * self.byte_cpu_seconds

        def ring(part_bytes: float, rounds: int) -> Cost:
            """Pass a part on in every round; each part leaves every node once."""
            outer = rounds * route.nodes / size if route.nodes > 1 else 0.0
            sent = part_bytes * rounds
            return route.chain(sent, rounds - outer, outer, busy(rounds, sent))

        def pairs(sent: float, peers: int) -> Cost:
            return route.pairs(sent, peers, cpu=busy(peers, sent))

        match collective.operation:
            case "all_reduce" | "reduce_scatter":
                return ring(nbytes / size, 2 * (size - 1))
            case "all_gather":
                return ring(nbytes, size - 1)
            case "all_to_all":
                return pairs((size - 1) / size * nbytes, size - 1)
            case "sendrecv" | "push":
                return pairs(nbytes, 1)
            case "broadcast" | "vote":  # a vote has no bytes
                inner = math.ceil(math.log2(route.members.per_node))
                outer = math.ceil(math.log2(size)) - inner
                cpu = busy(inner + outer, nbytes * (inner + outer))
                return route.cost(inner, outer, nbytes * outer, nbytes * inner, cpu)
        raise _unknown(collective)


@dataclass(frozen=True)
class NCCL:
    """NCCL with its own tuning table: Note [Costs in NCCL]."""

    name: ClassVar[str] = "nccl"
    concurrent: ClassVar[int] = 1  # the collectives of a communicator run one after the other
    has_stage_groups: ClassVar[bool] = False

    def cost(self, collective: Collective, network: Network) -> Cost:
        """Return the cost of a collective. Raises ValueError for an unknown operation."""
        around, across = (_Route(collective.members, network, *each) for each in (_RING, _TREE))
        nbytes, size, nodes = collective.tensor_bytes, around.size, around.nodes

        def ring(sent: float, passes: int = 1) -> Cost:
            """Pass a message around all ranks in order, ``passes`` times."""
            return around.chain(sent, passes * (size - nodes), passes * (nodes - 1))

        def tree() -> Cost:
            """Send all bytes up and down a chain in each node and a tree of nodes."""
            inner, outer = 2 * (size // nodes - 1), 2 * math.ceil(math.log2(nodes))
            return across.chain(2 * nbytes / _TREE_EFFICIENCY, inner, outer)

        def pairs(sent: float, peers: int) -> Cost:
            return around.pairs(sent, peers, math.ceil(peers / _PEERS_AT_ONCE))

        match collective.operation:
            case "all_reduce":
                found = ring(2 * (size - 1) / size * nbytes, passes=2), tree()
                return min(found, key=lambda cost: cost.seconds_alone(network))
            case "reduce_scatter":
                return ring((size - 1) / size * nbytes)
            case "all_gather":
                return ring((size - 1) * nbytes)
            case "broadcast":
                return ring(nbytes)
            case "all_to_all":
                return pairs((size - 1) / size * nbytes, size - 1)
            case "sendrecv" | "push":
                return pairs(nbytes, 1)
        raise _unknown(collective)


Backend: TypeAlias = Gloo | NCCL
"""A library of collectives."""


def _unknown(collective: Collective) -> ValueError:
    return ValueError(f"the cost of the collective {collective.operation!r} is unknown")
