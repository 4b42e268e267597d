"""The ranks that torchrun started, and the network between their hosts, measured pair by pair.

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
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commhooks.cluster.worker import CallResult
from commhooks.errors import CommHookError, CommHookPeerError, reason_of
from commhooks.lab.comparison.result import HostPair
from commhooks.lab.comparison.setting import RankCaller

__all__ = ["LaunchedRanks", "measure_pairs", "pairs_of_hosts"]

_ROUND_TRIPS = 30
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28
_SECONDS = 0.25
_PATIENCE = timedelta(hours=2)
"""A rank that has failed waits here for peers, which wait for it until their own time-out."""


class LaunchedRanks(AbstractContextManager["LaunchedRanks"]):
    """A context manager of this job's ranks. All of them run the same comparison.

    ``ranks(fn, ...)`` runs ``fn`` on this rank and returns the results of all ranks, so all come to
    the same decisions. If it raises on one rank, all of them raise that rank's error. If a process
    dies, torchrun ends all of them.
    """

    def __init__(self) -> None:
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self._results = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results by rank. They are sent in a group of their own."""
        try:
            own = CallResult(fn(self.rank, *args, **kwargs))
        except Exception as error:
            own = CallResult.of_failure(error)
        found: list[CallResult] = [own] * self.world_size
        dist.all_gather_object(found, own, group=self._results)
        errors = [
            result.exception(rank, self.world_size)
            for rank, result in enumerate(found)
            if result.error is not None
        ]
        if errors:  # raise the first one that is not about another rank's
            raise min(errors, key=lambda each: isinstance(each, CommHookPeerError))
        return [result.value for result in found]

    def restart(self) -> None:
        """Check that the ranks still answer each other: they are processes of torchrun."""
        try:
            dist.barrier()
        except RuntimeError as error:
            raise CommHookError(
                "the ranks cannot go on after an error, because they do not answer each other any "
                f"more; compare without the hook that failed last: {reason_of(error)}"
            ) from error

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._owns_group and error is None:  # after an error, peers may not answer
            dist.destroy_process_group()


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
