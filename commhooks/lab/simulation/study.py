"""Compare hooks on one network, to choose between them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from commhooks.costs.backends import Backend
from commhooks.costs.network import Link, Network
from commhooks.costs.prediction import DryRuns, Prediction, predict
from commhooks.costs.units import format_rate
from commhooks.lab.verdict import verdict

BASELINE = "allreduce"
"""The hook that others are compared with, because it is exact."""

_LONG_CURVE = 1024  # nodes
_RATES = [10 ** (6 + step / 2) for step in range(15)]  # 1 Mbit/s to 10 Tbit/s
_PRECISION = 1.01  # of a break-even rate
UNLIMITED = Link(1e15)
"""A link that takes no time."""


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


@dataclass(frozen=True)
class Study:
    """Predictions for ``hooks``, by name, on one network. Other arguments as in :func:`predict`.

    ``loopback_seconds`` are measured steps over loopback, by hook. With them a predicted step is

        measured over loopback + (simulated over the link - simulated over loopback)

    so that whatever the simulation leaves out is measured.
    """

    hooks: Mapping[str, DryRuns]
    network: Network
    backend: Backend
    cores: float = math.inf
    speed: float = 1.0
    baseline: str = BASELINE
    loopback_seconds: Mapping[str, float] | None = None
    loopback: Link = UNLIMITED
    """The link over which they are measured."""

    @cached_property
    def predictions(self) -> dict[str, Prediction]:
        """The simulated steps, by hook."""
        return {hook: self._simulate(hook, self.network) for hook in self.hooks}

    @property
    def alone_seconds(self) -> float:
        """The time of a step without communication."""
        baseline = self.predictions[self.baseline]
        return baseline.step_seconds - baseline.exposed_seconds

    def step_seconds(self, hook: str, bits_per_second: float) -> float:
        """Predict a step over links of another rate."""
        link = replace(self.network.link, bits_per_second=bits_per_second)
        seconds = self._simulate(hook, replace(self.network, link=link)).step_seconds
        if self.loopback_seconds is None:
            return seconds
        loopback = replace(self.network, link=self.loopback, node_link=self.loopback)
        added = seconds - self._simulate(hook, loopback).step_seconds
        if bits_per_second <= self.loopback.bits_per_second:
            added = max(0.0, added)
        return self.loopback_seconds[hook] + added

    def break_even(self, hook: str) -> BreakEvenRates | None:
        """Return the rates of links at which ``hook`` beats the baseline; None if it never does."""
        return break_even_rates(
            lambda rate: self.step_seconds(hook, rate) < self.step_seconds(self.baseline, rate)
        )

    def curve(self, hook: str, sizes: Sequence[int]) -> list[float | None]:
        """Return the simulated seconds per step in worlds of ``sizes``; None if not predictable."""

        def seconds(size: int) -> float | None:
            if not self.hooks[hook].has(size):
                return None
            return self._simulate(hook, replace(self.network, size=size)).step_seconds

        return list(map(seconds, sizes))

    @property
    def advice(self) -> str:
        """Sentences that say which hook to use."""
        if len(self.predictions) == 1:
            return f"There is nothing to compare {self.baseline} with: name other hooks."
        seconds = {hook: found.step_seconds for hook, found in self.predictions.items()}
        return verdict(seconds, self.baseline)

    def to_json(self) -> dict[str, Any]:
        """Return all predictions in JSON's types.

        ``break_even`` has the ends of the interval in bits per second; null stands for no end. In
        ``curve_seconds`` null stands for a size at which the hook cannot be predicted.
        """
        sizes = curve_sizes(self.network)
        hooks = {}
        for hook, prediction in self.predictions.items():
            rates = self.break_even(hook)
            ends = rates and {
                name: end if math.isfinite(end) else None for name, end in asdict(rates).items()
            }
            curve = self.curve(hook, sizes)
            hooks[hook] = asdict(prediction) | {"break_even": ends, "curve_seconds": curve}
        return {
            "network": asdict(self.network),
            "backend": self.backend.name,
            "alone_seconds": self.alone_seconds,
            "hooks": hooks,
            "curve_ranks": sizes,
            "advice": self.advice,
        }

    def _simulate(self, hook: str, network: Network) -> Prediction:
        return predict(self.hooks[hook], network, self.backend, cores=self.cores, speed=self.speed)


def curve_sizes(network: Network) -> list[int]:
    """Return world sizes from two nodes up, beyond the size of the network."""
    per_node = network.ranks_per_node
    longest = max(network.size, _LONG_CURVE * per_node)
    doublings = range(1, math.floor(math.log2(longest / per_node)) + 1)
    return sorted({network.size, *(per_node << power for power in doublings)})


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
