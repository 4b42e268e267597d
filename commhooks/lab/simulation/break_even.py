"""The rates of links at which a step with one hook is faster than with another."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from commhooks.lab.units import format_rate

__all__ = ["BreakEvenRates", "break_even_rates"]

_RATES = [10 ** (6 + step / 2) for step in range(15)]  # 1 Mbit/s to 10 Tbit/s
_PRECISION = 1.01


@dataclass(frozen=True)
class BreakEvenRates:
    """An interval of rates in bits per second; from 0 to infinity stands for any rate.

    Most hooks are faster below some rate, because they save bytes and cost time. Hooks that save
    rounds of messages, but send more bytes between nodes, are faster above some rate.
    """

    above: float
    below: float

    def __str__(self) -> str:
        ends = []
        if self.above > 0:
            ends.append(f"above {format_rate(self.above)}")
        if math.isfinite(self.below):
            ends.append(f"below {format_rate(self.below)}")
        return ", ".join(ends) or "any rate"


def break_even_rates(is_faster: Callable[[float], bool]) -> BreakEvenRates | None:
    """Find the rates for which ``is_faster`` returns True; None if there are none.

    If there are several intervals, this is the lowest one.
    """
    first = next((index for index, rate in enumerate(_RATES) if is_faster(rate)), None)
    if first is None:
        return None
    last = first
    while last + 1 < len(_RATES) and is_faster(_RATES[last + 1]):
        last += 1
    above, below = 0.0, math.inf
    if first > 0:
        above = _edge(is_faster, _RATES[first], _RATES[first - 1])
    if last + 1 < len(_RATES):
        below = _edge(is_faster, _RATES[last], _RATES[last + 1])
    return BreakEvenRates(above, below)


def _edge(is_faster: Callable[[float], bool], inside: float, outside: float) -> float:
    """Bisect between a rate inside the interval and one outside; return one just inside."""
    while max(inside, outside) / min(inside, outside) > _PRECISION:
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if is_faster(middle) else (inside, middle)
    return inside
