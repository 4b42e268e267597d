"""The costs of collectives in Gloo over TCP, with the algorithms that PyTorch chooses.

With N members and a tensor of S bytes on each rank, a rank sends these bytes in these numbers of
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
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from commhooks.costs.network import Cost, Network
from commhooks.costs.step_trace import Collective

__all__ = ["Gloo"]


@dataclass(frozen=True)
class Gloo:
    """The rates of a machine, as :mod:`commhooks.lab.simulation.calibration` measures them."""

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
        """Return the cost by the table above. Raises ValueError for an unknown operation."""
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
