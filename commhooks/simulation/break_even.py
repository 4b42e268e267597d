"""The rate of links at which one way to average overtakes another."""

import math
from collections.abc import Callable

__all__ = ["break_even_rate"]

_SLOWEST, _FASTEST = 1e6, 1e13  # bits per second
_PRECISION = 1.01


def break_even_rate(pays: Callable[[float], bool]) -> float:
    """The rate of links, in bits per second, below which something pays.

    ``pays`` says whether it does at a rate. 0: it does at none; infinity: at any. Where that
    changes several times, one of these rates.
    """
    low, high = _SLOWEST, _FASTEST
    if not pays(low):
        return 0.0
    if pays(high):
        return math.inf
    while high / low > _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
