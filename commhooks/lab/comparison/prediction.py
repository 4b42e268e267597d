"""Links that are not there, predicted by :mod:`commhooks.lab.simulation`, from where it was
measured.

The simulation says what a step takes over a link as well as over loopback. The latter was measured,
too, with all that the simulation leaves out; so what is taken from it is the difference:

    step over the link = measured over loopback + (simulated over the link - over loopback)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commhooks.lab.comparison.entry import TORCH, Contender
from commhooks.lab.machine import cores
from commhooks.lab.simulation import (
    BASELINE,
    Link,
    Measurements,
    Network,
    PayingRates,
    paying_rates,
    predict,
)

__all__ = ["Predictor", "config_of"]

_LATENCY_SECONDS = 20e-6  # as by default in `commhooks simulate`
_LOOPBACK = Link(1e15)  # bytes cost what they cost the cores, which is in the rates of Gloo


def config_of(contender: Contender) -> Mapping[str, Any] | None:
    """Of the hook that stands for it: torch's wrapper sends what plain averaging does."""
    return {"name": BASELINE} if contender == TORCH else contender.config


@dataclass(frozen=True)
class Predictor:
    """``loopback_seconds``: the measured step of each contender, by name."""

    measurements: Measurements
    world_size: int
    loopback_seconds: Mapping[str, float]

    def step_seconds(self, contender: Contender, bits_per_second: float) -> float:
        """Of a step over links of this rate, one for each rank."""
        link = Link(bits_per_second, _LATENCY_SECONDS)
        more = self._simulated(contender, link) - self._simulated(contender, _LOOPBACK)
        return self.loopback_seconds[contender.name] + max(0.0, more)

    def pays(self, contender: Contender) -> PayingRates | None:
        """At which rates of links it is faster than torch's averaging; None: at none."""
        return paying_rates(
            lambda rate: self.step_seconds(contender, rate) < self.step_seconds(TORCH, rate)
        )

    def _simulated(self, contender: Contender, link: Link) -> float:
        config = config_of(contender)
        if config is None:
            return 0.0
        rehearsals, gloo = self.measurements.of(config), self.measurements.gloo
        network = Network(self.world_size, link, link)
        return predict(rehearsals, network, gloo, cores=cores() / self.world_size).step_seconds
