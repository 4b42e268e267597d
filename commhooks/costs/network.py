"""The network between ranks.

There are two levels. Each node has one link to the network, shared by its ``ranks_per_node`` ranks;
and each rank has a link inside its node. All links carry their full rate in both directions at the
same time, and nothing between them is a bottleneck.
"""

from dataclasses import dataclass

from commhooks.errors import CommHookOptionError

ETHERNET_SHARE = 1448 / 1514
"""The share of payload in a full Ethernet frame: IPv4, TCP with time stamps, 1500 bytes."""


@dataclass(frozen=True)
class Link:
    """One direction of a link.

    Raises CommHookOptionError for a rate that is not positive or a negative latency.
    """

    bits_per_second: float
    latency_seconds: float = 0.0
    payload_share: float = ETHERNET_SHARE

    def __post_init__(self) -> None:
        if not self.bits_per_second > 0 or self.latency_seconds < 0:
            raise CommHookOptionError(
                "a link: expected a positive rate and a latency of 0 or more, found "
                f"{self.bits_per_second:g} bit/s and {self.latency_seconds:g} s"
            )

    @property
    def bytes_per_second(self) -> float:
        """The rate of payload."""
        return self.bits_per_second / 8 * self.payload_share


@dataclass(frozen=True)
class Network:
    """``size`` ranks, the ``link`` of each node, and the ``node_link`` of each rank in its node.

    Raises CommHookOptionError unless every node has ``ranks_per_node`` ranks.
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
