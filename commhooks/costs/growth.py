"""Extrapolation from a few numbers of ranks to any number.

The bytes of a tensor that a hook sends do not depend on the number of ranks N, or they shrink as
1/N when a rank sends the part that it has averaged, or they grow with N when there is something for
each rank. Local work grows with N when something is done for each peer.
"""

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["bytes_at", "seconds_at"]

_TERMS: tuple[Callable[[float], float], ...] = (lambda _: 1.0, lambda n: 1 / n, lambda n: n)
_FORMS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))  # simplest first
_TOLERANCE = 0.01  # rounding up to whole blocks changes bytes by less


def bytes_at(size: int, sizes: Sequence[int], values: Sequence[float]) -> float:
    """Extrapolate bytes to ``size`` ranks, rounded to a whole number.

    Fits the simplest sum of the terms 1, 1/N and N that reproduces all ``values`` within 1 %. A
    form with more terms would also fit the rounding, and multiply that by N.
    """
    if max(values) == 0:
        return 0.0
    known = np.array(values, dtype=float)
    for form in _FORMS:
        columns = np.array([[_TERMS[term](n) for term in form] for n in sizes])
        factors = np.linalg.lstsq(columns, known, rcond=None)[0]
        if np.abs(columns @ factors - known).max() <= _TOLERANCE * known.max():
            break
    terms = np.array([_TERMS[term](size) for term in form])
    return max(0.0, round(float(terms @ factors)))


def seconds_at(size: int, sizes: Sequence[int], values: Sequence[float]) -> float:
    """Extrapolate seconds along the line through the smallest and the largest of ``sizes``.

    The line does not fall. Measured times scatter, and a line fitted to all of them would take its
    slope from the small sizes.
    """
    (first, low), *_, (last, high) = sorted(zip(sizes, values, strict=True))
    slope = max(0.0, (high - low) / (last - first))
    return low + slope * (size - first)
