"""Robust estimates from few measurements that are far off now and then."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Cost", "Point", "fit"]

_ROUNDS = 8
_TRUSTED = 0.05
"""Relative residuals below this count in full."""


class Point(NamedTuple):
    """A measurement: ``seconds`` for ``units``, which cost a fixed time each, and ``bytes``."""

    units: float
    bytes: float
    seconds: float


class Cost(NamedTuple):
    """The seconds per unit and per byte."""

    per_unit: float
    per_byte: float

    def seconds(self, units: float, nbytes: float) -> float:
        """Return the time that these take."""
        return self.per_unit * units + self.per_byte * nbytes


def fit(points: Iterable[Point]) -> Cost | None:
    """Return the costs that explain the points best, neither negative; None without points.

    Residuals are relative, or small messages would not count, and large ones would alone decide the
    cost of a unit. Outliers count little: the weights are those of least absolute residuals. Longer
    times count more, because links send the first bytes after a pause faster than the others.
    """
    known = [p for p in points if 0 < p.seconds < math.inf and p.units + p.bytes > 0]
    if not known:
        return None
    weights = [math.sqrt(point.seconds) for point in known]
    cost = Cost(0.0, 0.0)
    for _ in range(_ROUNDS):
        cost = _least_squares(known, weights)
        residuals = [abs(cost.seconds(p.units, p.bytes) / p.seconds - 1) for p in known]
        weights = [
            math.sqrt(point.seconds) / max(residual, _TRUSTED)
            for point, residual in zip(known, residuals, strict=True)
        ]
    return cost


def _least_squares(points: Sequence[Point], weights: Sequence[float]) -> Cost:
    """Solve for two coefficients of at least 0; one of them is 0 where both do not fit."""
    uu = ub = bb = ut = bt = 0.0
    for (units, nbytes, seconds), weight in zip(points, weights, strict=True):
        u, b = units / seconds, nbytes / seconds
        uu, ub, bb = uu + weight * u * u, ub + weight * u * b, bb + weight * b * b
        ut, bt = ut + weight * u, bt + weight * b
    determinant = uu * bb - ub * ub
    if determinant > 1e-9 * uu * bb:
        per_unit = (ut * bb - bt * ub) / determinant
        per_byte = (bt * uu - ut * ub) / determinant
        if per_unit >= 0 and per_byte >= 0:
            return Cost(per_unit, per_byte)
    choices = [Cost(ut / uu, 0.0)] if uu else []
    choices += [Cost(0.0, bt / bb)] if bb else []

    def loss(cost: Cost) -> float:
        return math.fsum(
            weight * (cost.seconds(p.units, p.bytes) / p.seconds - 1) ** 2
            for p, weight in zip(points, weights, strict=True)
        )

    return min(choices, key=loss)
