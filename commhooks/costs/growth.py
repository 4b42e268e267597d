"""What is known for a few numbers of ranks, told for any.

The bytes of a tensor that a hook sends are the same for any N, or shrink as 1/N where a rank sends
what it has averaged of its part, or grow with N where there is something for each rank. Local work
grows with N where something is done for each peer.
"""

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["bytes_at", "seconds_at"]

_TERMS: tuple[Callable[[float], float], ...] = (lambda _: 1.0, lambda n: 1 / n, lambda n: n)
_FORMS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))  # simplest first
_TOLERANCE = 0.01  # what rounding up to whole blocks makes of a formula


def bytes_at(size: int, sizes: Sequence[int], values: Sequence[float]) -> float:
    """By the simplest sum of the terms 1, 1/N and N that fits all ``values`` within 1 %, rounded.

    The simplest one, because what a more flexible one makes of rounding, it multiplies with N.
    """
    if max(values) == 0:
        return 0.0
    known = np.array(values, dtype=float)
    for form in _FORMS:
        columns = np.array([[_TERMS[term](n) for term in form] for n in sizes])
        factors = np.linalg.lstsq(columns, known, rcond=None)[0]
        if np.abs(columns @ factors - known).max() <= _TOLERANCE * known.max():
            break
    there = np.array([_TERMS[term](size) for term in form])
    return max(0.0, round(float(there @ factors)))


def seconds_at(size: int, sizes: Sequence[int], values: Sequence[float]) -> float:
    """On a line through those of the smallest and the largest of ``sizes``; it does not fall.

    Times scatter: a line through all of them would have the slope of that of the small ones.
    """
    (first, low), *_, (last, high) = sorted(zip(sizes, values, strict=True))
    slope = max(0.0, (high - low) / (last - first))
    return low + slope * (size - first)
