"""Estimates the link between the ranks from the times of collectives in the run.

The costs of collectives say over how many rounds and with how many bytes each is sent. A fit of
seconds to both gives the latency of a round and the rate. Of several ranks, the shortest time of a
collective counts: the others waited for a peer.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from commhooks.algorithms.adaptive.fit import Cost, Point, fit, quantile
from commhooks.algorithms.adaptive.observation import Observed
from commhooks.costs.gloo import Gloo
from commhooks.costs.nccl import NCCL
from commhooks.costs.network import Backend, Link, Network
from commhooks.costs.step_trace import Collective, Members

__all__ = ["NUMBERS", "LinkTimes", "backend_of", "fit_link", "network_of", "tensor_bytes"]

_CLASSES = 32
"""Collectives are told apart by the power of two of their bytes."""
NUMBERS = 3 * _CLASSES
_QUANTILE = 0.25
"""Of the times of equal collectives: most disturbances make them longer."""
_UNLIMITED = 1e15


def backend_of(name: str) -> Backend:
    """Return the costs of a backend, all of which are the network's."""
    return NCCL() if name == "nccl" else Gloo(0.0, 0.0, 0.0)


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
        self._points: dict[int, list[Point]] = defaultdict(list)

    def add(self, observed: Observed) -> float:
        """Add a collective, in the order of completion. Return the seconds that it took.

        A link serves one collective after the other: the time of one begins when it is issued, or
        when the one before it has completed.
        """
        start = max(observed.issued_ns, self._completed_ns)
        self._completed_ns = max(observed.completed_ns, self._completed_ns)
        seconds = (observed.completed_ns - start) * 1e-9
        if observed.members or seconds <= 0 or self._size < 2:
            return max(seconds, 0.0)
        nbytes = tensor_bytes(observed.operation, observed.wire_bytes, self._size)
        collective = Collective(observed.operation, nbytes, Members(1, spans_nodes=True))
        cost = self._backend.cost(collective, self._network)
        size_class = min(int(math.log2(observed.wire_bytes + 1)), _CLASSES - 1)
        self._points[size_class].append(Point(cost.latency_seconds, cost.link_bytes, seconds))
        return seconds

    def encode(self) -> list[float]:
        """Return :data:`NUMBERS` numbers: a point for each class, NaN if there is none."""
        numbers = [math.nan] * NUMBERS
        for i, points in self._points.items():
            (units, nbytes), _ = Counter((p.units, p.bytes) for p in points).most_common(1)[0]
            equal = [p.seconds for p in points if (p.units, p.bytes) == (units, nbytes)]
            numbers[3 * i : 3 * i + 3] = units, nbytes, quantile(equal, _QUANTILE)
        return numbers

    def clear(self) -> None:
        """Forget what has been reported."""
        self._points.clear()


def fit_link(of_ranks: Iterable[Sequence[float]]) -> Cost | None:
    """Return the costs of a round and of a byte, from what all ranks encoded; None if unknown."""
    points: list[Point] = []
    rows = [[Point(*row[i : i + 3]) for i in range(0, NUMBERS, 3)] for row in of_ranks]
    for of_class in zip(*rows, strict=True):
        known = [point for point in of_class if point.seconds == point.seconds]
        if known:
            points.append(min(known, key=lambda point: point.seconds))
    return fit(points)
