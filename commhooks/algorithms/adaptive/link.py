"""Estimates the link between the ranks from the times of collectives in the run.

The costs of collectives say over how many rounds and with how many bytes each is sent. The smallest
show the latency of a round, the largest the rate. Of several ranks, the shortest time counts: the
others waited for a peer.

Note [Bytes in a row]
~~~~~~~~~~~~~~~~~~~~~
Links, switches and limits of clouds have buffers or tokens, so that after a pause some bytes pass
faster than the rate. Then the time of a message says nothing of the rate, however often it is
measured. A message shows it that follows many bytes without a pause, when all buffers are full.

So collectives are summed up by *rows*: those without a pause between them in which buffers could
take up a part that matters. The second half of the bytes of the longest rows shows the rate. Sums
also do not depend on which of several collectives that are under way completes first. An estimate
says how long its row was, and link_watch.py decides whether it counts.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from commhooks.algorithms.adaptive.fit import Cost, Point
from commhooks.algorithms.adaptive.observation import Observed
from commhooks.costs.backends import NCCL, Backend, Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.step_trace import Collective, Members

__all__ = [
    "NUMBERS",
    "Estimate",
    "LinkTimes",
    "backend_of",
    "fit_link",
    "network_of",
    "row_class",
    "tensor_bytes",
]

_CLASSES = 32
"""Rows are told apart by the power of two of their bytes."""
NUMBERS = 3 * _CLASSES
_SMALL_BYTES = 4096
"""The time of a smaller collective is that of its rounds."""
_PART = 1 / 16
"""A pause in which the link could send a larger part of a collective begins another row."""
_MOST_ROUNDS = 1 / 8
"""Of a row's time. Latency is known from few small messages, and processes that wake up late make
it seem longer, so it must not make the link seem faster by a fifth."""
_QUANTILE = 0.25
"""Of the times of like rows: most disturbances make them longer."""
_UNLIMITED = 1e15


class Estimate(NamedTuple):
    """What collectives say about the link."""

    round_seconds: float
    """NaN if unknown."""
    row_class: int
    """Of the longest row; see Note [Bytes in a row]."""
    last: Point
    """The second half of such a row."""

    def cost(self, round_seconds: float) -> Cost:
        """Return the costs of a round, which is given, and of a byte."""
        units, nbytes, seconds = self.last
        sending = max(seconds - round_seconds * units, (1 - _MOST_ROUNDS) * seconds)
        return Cost(round_seconds, sending / max(nbytes, 1.0))


def row_class(nbytes: float) -> int:
    """Return the power of two of a number of bytes."""
    return min(int(math.log2(nbytes + 1)), _CLASSES - 1)


def backend_of(name: str, byte_cpu_seconds: float = 0.0) -> Backend:
    """Return the costs of a backend. Those of a round are the network's."""
    return NCCL() if name == "nccl" else Gloo(0.0, 0.0, byte_cpu_seconds)


def network_of(cost: Cost, size: int) -> Network:
    """Return ``size`` nodes of one rank each, with these costs of a round and of a byte."""
    rate = min(8 / cost.per_byte, _UNLIMITED) if cost.per_byte > 0 else _UNLIMITED
    return Network(size, Link(rate, cost.per_unit, payload_share=1.0), Link(_UNLIMITED))


def tensor_bytes(operation: str, wire_bytes: float, size: int) -> float:
    """Return the size of the tensor of a collective by which a rank sends ``wire_bytes``."""
    whole = 1 << 20
    per_byte = Collective(operation, whole, Members(1, spans_nodes=True)).wire_bytes(size) / whole
    return wire_bytes / per_byte if per_byte else 0.0


class LinkTimes:
    """The times of the collectives since the last report."""

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend = backend
        self._network = network_of(Cost(1.0, 0.0), size)  # so that seconds are rounds
        self._size = size
        self._completed_ns = 0
        self._row: list[Point] = []
        self._row_end_ns = 0
        self._points: dict[int, list[Point]] = defaultdict(list)

    def add(self, observed: Observed) -> float:
        """Add a collective, in the order of completion. Return the seconds that it took.

        A link serves one collective after the other: the time of one begins when it is issued, or
        when the one before it has completed.
        """
        start = max(observed.issued_ns, self._completed_ns)
        self._completed_ns = max(observed.completed_ns, self._completed_ns)
        seconds = max((observed.completed_ns - start) * 1e-9, 0.0)
        if observed.members or self._size < 2:
            return seconds
        nbytes = tensor_bytes(observed.operation, observed.wire_bytes, self._size)
        collective = Collective(observed.operation, nbytes, Members(1, spans_nodes=True))
        cost = self._backend.cost(collective, self._network)
        point = Point(cost.latency_seconds, cost.link_bytes, seconds)
        if point.bytes < _SMALL_BYTES:
            self._points[row_class(point.bytes)].append(point)
        else:
            self._add_to_row(point, start)
        return seconds

    def _add_to_row(self, point: Point, start_ns: int) -> None:
        row, pause = _sum(self._row), (start_ns - self._row_end_ns) * 1e-9
        if pause * row.bytes > _PART * point.bytes * row.seconds:
            self._end_row()
        self._row.append(point)
        self._row_end_ns = self._completed_ns

    def _end_row(self) -> None:
        """Keep what came after half of the bytes; at least the last collective."""
        row, self._row = self._row, []
        total = _sum(row).bytes
        until = list(accumulate(point.bytes for point in row))
        later = [p for p, end in zip(row, until, strict=True) if end - p.bytes >= total / 2]
        last = _sum(later or row[-1:])
        if last.seconds > 0:
            self._points[row_class(total)].append(last)

    def encode(self) -> list[float]:
        """Return :data:`NUMBERS` numbers: a point for each class, NaN if there is none."""
        self._end_row()
        numbers = [math.nan] * NUMBERS
        for i, points in self._points.items():
            ordered = sorted(points, key=_slowness)
            numbers[3 * i : 3 * i + 3] = ordered[int(_QUANTILE * (len(ordered) - 1))]
        return numbers

    def clear(self) -> None:
        """Forget what has been reported."""
        self._points.clear()
        self._row = []


def fit_link(of_ranks: Iterable[Sequence[float]], *, is_probe: bool = False) -> Estimate | None:
    """Return what all ranks encoded says together; None if nothing.

    In a probe, no rank waits for another one's backward. There the mean counts, because a rank that
    begins late finds bytes that its peer has sent before.
    """
    rows = [[Point(*row[i : i + 3]) for i in range(0, NUMBERS, 3)] for row in of_ranks]
    points: dict[int, Point] = {}
    for i, of_class in enumerate(zip(*rows, strict=True)):
        known = [point for point in of_class if point.seconds == point.seconds]
        if known:
            points[i] = _mean(known) if is_probe else min(known, key=_slowness)
    if not points:
        return None
    small = [p.seconds / p.units for p in points.values() if 0 < p.bytes < _SMALL_BYTES]
    longest = max(points)
    return Estimate(min(small, default=math.nan), longest, points[longest])


def _sum(points: Sequence[Point]) -> Point:
    return Point(*map(math.fsum, zip(*points, strict=True))) if points else Point(0.0, 0.0, 0.0)


def _mean(points: Sequence[Point]) -> Point:
    return Point(*map(fmean, zip(*points, strict=True)))


def _slowness(point: Point) -> float:
    return point.seconds / max(point.bytes, 1.0)
