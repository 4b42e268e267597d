"""The costs of collectives in NCCL, by NCCL's own cost model.

The latencies are those by which NCCL chooses between its algorithms,
https://github.com/NVIDIA/nccl, src/graph/tuning.cc, for NVLink inside nodes and InfiniBand between
them, in the protocols that win for small and for large messages. With N members on n nodes and a
tensor of S bytes on each rank, a rank sends these bytes over these numbers of hops inside nodes and
between nodes:

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
from typing import ClassVar

from commhooks.costs.network import Cost, Network
from commhooks.costs.step_trace import Collective

__all__ = ["NCCL"]

_RING_SECONDS, _RING_INNER, _RING_OUTER = 8.4e-6, 3.4e-6, 9.6e-6
_TREE_SECONDS, _TREE_INNER, _TREE_OUTER = 4.4e-6, 0.52e-6, 5.0e-6
_TREE_EFFICIENCY = 0.9
_PEERS_AT_ONCE = 8


@dataclass(frozen=True)
class NCCL:
    """NCCL with its own tuning table; it has no options."""

    name: ClassVar[str] = "nccl"
    concurrent: ClassVar[int] = 1  # the collectives of a communicator run one after the other
    has_stage_groups: ClassVar[bool] = False

    def cost(self, collective: Collective, network: Network) -> Cost:
        """Return the cost by the table above. Raises ValueError for an unknown operation."""
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
