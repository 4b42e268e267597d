"""The rates of links at which one way to average beats another."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from commhooks.lab.units import format_rate

__all__ = ["PayingRates", "paying_rates"]

_RATES = [10 ** (6 + step / 2) for step in range(15)]  # 1 Mbit/s to 10 Tbit/s
_PRECISION = 1.01


@dataclass(frozen=True)
class PayingRates:
    """An interval, in bits per second; from 0 to infinity: any rate.

    Most hooks pay below some rate, because they save bytes and cost time. Those that save rounds of
    messages, but not bytes between nodes, pay above one.
    """

    above: float
    below: float

    def __str__(self) -> str:
        ends = []
        if self.above > 0:
            ends.append(f"above {format_rate(self.above)}")
        if math.isfinite(self.below):
            ends.append(f"below {format_rate(self.below)}")
        return ", ".join(ends) or "at any rate"


def paying_rates(pays: Callable[[float], bool]) -> PayingRates | None:
    """Where ``pays``, which maps a rate to whether it does, is true; None: nowhere.

    Of several intervals the lowest.
    """
    first = next((index for index, rate in enumerate(_RATES) if pays(rate)), None)
    if first is None:
        return None
    last = first
    while last + 1 < len(_RATES) and pays(_RATES[last + 1]):
        last += 1
    return PayingRates(
        above=_edge(pays, _RATES[first], _RATES[first - 1]) if first > 0 else 0.0,
        below=_edge(pays, _RATES[last], _RATES[last + 1]) if last + 1 < len(_RATES) else math.inf,
    )


def _edge(pays: Callable[[float], bool], inside: float, outside: float) -> float:
    """Between a rate at which it pays and one at which it does not; one at which it does."""
    while max(inside, outside) / min(inside, outside) > _PRECISION:
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if pays(middle) else (inside, middle)
    return inside
