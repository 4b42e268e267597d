"""The network between ranks, and how a backend uses it: times of collectives.

Two levels: nodes have a link to the network each, which the ``ranks_per_node`` ranks of a node
share; and every rank has a link inside its node. All links carry their full rate in both directions
at the same time, and what lies between them is never the bottleneck.
"""

from dataclasses import dataclass, field
from typing import Protocol

from commhooks.costs.step_trace import Collective
from commhooks.errors import CommHookOptionError

__all__ = ["Backend", "Cost", "Link", "Network"]

ETHERNET_SHARE = 1448 / 1514
"""Payload in a full Ethernet frame: IPv4, TCP with time stamps, 1500 bytes."""


@dataclass(frozen=True)
class Link:
    """A link, in one direction. ``burst_bytes``: sent at once after a pause.

    Token buckets give such bursts: ``tc tbf``, and the limits of cloud machines.

    Raises CommHookOptionError for a rate that is not positive or a negative latency.
    """

    bits_per_second: float
    latency_seconds: float = 0.0
    payload_share: float = ETHERNET_SHARE
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.bits_per_second > 0 or self.latency_seconds < 0:
            raise CommHookOptionError(
                "a link: expected a positive rate and a latency of 0 or more, found "
                f"{self.bits_per_second:g} bit/s and {self.latency_seconds:g} s"
            )

    @property
    def bytes_per_second(self) -> float:
        """Of payload."""
        return self.bits_per_second / 8 * self.payload_share


@dataclass(frozen=True)
class Network:
    """``size`` ranks, with the ``link`` of each node and the ``node_link`` of each rank.

    Raises CommHookOptionError unless all nodes have ``ranks_per_node`` ranks.
    """

    size: int
    link: Link
    node_link: Link
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.ranks_per_node < 1 or self.size % self.ranks_per_node != 0:
            raise CommHookOptionError(
                f"expected a world size that is a multiple of the ranks per node, found "
                f"{self.size} ranks, {self.ranks_per_node} per node"
            )

    @property
    def nodes(self) -> int:
        return self.size // self.ranks_per_node


@dataclass(frozen=True)
class Cost:
    """What a collective takes of a rank. Its parts but the latency go on at the same time."""

    latency_seconds: float
    link_bytes: float
    """Over the network."""
    node_bytes: float
    """Over links inside the node."""
    cpu_seconds: float = field(default=0.0)


class Backend(Protocol):
    """What carries collectives out."""

    @property
    def name(self) -> str:
        """As in ``CommHook.backends``."""
        ...

    @property
    def concurrent(self) -> int:
        """How many collectives one process group carries out at once."""
        ...

    @property
    def has_stage_channels(self) -> bool:
        """Whether hooks have a process group per stage, and vote: see
        commhooks/runtime/scheduler.py.
        """
        ...

    def cost(self, collective: Collective, network: Network) -> Cost:
        """Of one collective."""
        ...
