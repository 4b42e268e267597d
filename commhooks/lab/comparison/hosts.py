"""Measure the network between hosts, pair by pair.

One rank of each host takes part, and one pair at a time. The first host of a pair sends a message,
and the second one answers:

    latency = half of the time of a round trip of 1 byte, the median of some
    rate    = 8 * bytes / the time of many bytes there and 1 byte back, or of 1 there and many back,
              whichever is slower

A large message that is not timed comes first, because links send a first burst faster than the
rest. Then its size doubles until it takes a quarter of a second.
"""

import itertools
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from commhooks.cluster import Device, RankCaller
from commhooks.lab.comparison.result import HostPair

_ROUND_TRIPS = 30
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28
_SECONDS = 0.25


def pairs_of_hosts(ranks: RankCaller) -> list[tuple[int, int]]:
    """Return the pairs of the first ranks of hosts. Torchrun tells which ranks share a host."""
    nodes = ranks(_node)
    first: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    return list(itertools.combinations(first.values(), 2))


def measure_pairs(ranks: RankCaller, pairs: Sequence[tuple[int, int]]) -> Iterator[HostPair]:
    """Measure the pairs of ranks one after the other, with messages in memory of their device."""
    names = ranks(_name)
    for a, b in pairs:

        def round_trip(there: int, back: int, a: int = a, b: int = b) -> float:
            return float(ranks(_round_trip, a, b, there, back, ranks.device)[a])

        latency = statistics.median(round_trip(1, 1) for _ in range(_ROUND_TRIPS)) / 2
        rate = min(_rate(lambda n: round_trip(n, 1)), _rate(lambda n: round_trip(1, n)))
        yield HostPair(names[a], names[b], rate, latency)


def _node(rank: int) -> str:
    return os.environ.get("GROUP_RANK", f"rank {rank}")


def _name(rank: int) -> str:
    return f"{platform.node()} (rank {rank})"


def _rate(seconds_for: Callable[[int], float]) -> float:
    """Return bits per second; all ranks see the same seconds, so they send the same sizes."""
    nbytes = _FIRST_BYTES
    seconds_for(nbytes)
    while (seconds := seconds_for(nbytes)) < _SECONDS and nbytes < _MOST_BYTES:
        nbytes *= 2
    return 8 * nbytes / seconds


def _round_trip(rank: int, a: int, b: int, there: int, back: int, device: Device) -> float:
    """Send some bytes from ``a`` to ``b`` and some back; return the seconds on ``a``."""
    sizes = (1, there, back)
    ready, message, answer = (device.put(torch.zeros(n, dtype=torch.uint8)) for n in sizes)
    if rank == b:
        dist.send(ready, a)
        dist.recv(message, a)
        dist.send(answer, a)
    if rank != a:
        return 0.0
    dist.recv(ready, b)
    start = device.now()
    dist.send(message, b)
    dist.recv(answer, b)
    return device.now() - start
