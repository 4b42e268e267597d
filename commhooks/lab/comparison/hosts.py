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
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from commhooks.cluster import RankCaller
from commhooks.lab.comparison.result import HostPair

__all__ = ["measure_pairs", "pairs_of_hosts"]

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
    """Measure the pairs one after the other."""
    names = ranks(_name)
    for a, b in pairs:
        latency, rate = ranks(_measure, a, b)[a]
        yield HostPair(names[a], names[b], rate, latency)


def _node(rank: int) -> str:
    return os.environ.get("GROUP_RANK", f"rank {rank}")


def _name(rank: int) -> str:
    return f"{platform.node()} (rank {rank})"


def _measure(rank: int, a: int, b: int) -> tuple[float, float] | None:
    """Return seconds and bits per second on rank ``a``; None on others."""
    if rank == b:
        _answer(a)
    if rank != a:
        return None
    trips = [_round_trip(b, 1, 1) for _ in range(_ROUND_TRIPS)]
    rate = min(
        _rate(lambda nbytes: _round_trip(b, nbytes, 1)),
        _rate(lambda nbytes: _round_trip(b, 1, nbytes)),
    )
    _announce(b, 0, 0)
    return statistics.median(trips) / 2, rate


def _rate(seconds_for: Callable[[int], float]) -> float:
    nbytes = _FIRST_BYTES
    seconds_for(nbytes)
    while (seconds := seconds_for(nbytes)) < _SECONDS and nbytes < _MOST_BYTES:
        nbytes *= 2
    return 8 * nbytes / seconds


def _round_trip(peer: int, there: int, back: int) -> float:
    """Send some bytes and receive some; return the seconds."""
    message, answer = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (there, back))
    _announce(peer, there, back)
    start = time.perf_counter()
    dist.send(message, peer)
    dist.recv(answer, peer)
    return time.perf_counter() - start


def _answer(peer: int) -> None:
    """Answer messages until the peer announces none."""
    sizes = torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(sizes, peer)
        there, back = sizes.tolist()
        if there == 0:
            return
        message, answer = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (there, back))
        dist.recv(message, peer)
        dist.send(answer, peer)


def _announce(peer: int, there: int, back: int) -> None:
    dist.send(torch.tensor([there, back]), peer)
