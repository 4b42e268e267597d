"""Hooks side by side on one network: which of them to take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from commhooks.costs.network import Backend, Network
from commhooks.lab.simulation.break_even import PayingRates, paying_rates
from commhooks.lab.simulation.dry_runs import Rehearsals
from commhooks.lab.simulation.prediction import Prediction, predict
from commhooks.lab.units import format_rate

__all__ = ["BASELINE", "Study"]

BASELINE = "allreduce"
"""What other hooks are compared with: it loses nothing."""

_WORTH_IT = 1.1
"""How many times faster a step has to be before losing anything makes sense."""
_LONG_CURVE = 1024  # ranks


@dataclass(frozen=True)
class Study:
    """``hooks`` by name, BASELINE among them. Other arguments as of :func:`predict`."""

    hooks: Mapping[str, Rehearsals]
    network: Network
    backend: Backend
    cores: float = math.inf
    speed: float = 1.0

    @cached_property
    def predictions(self) -> dict[str, Prediction]:
        """By hook."""
        return {hook: self._on(self.network, hook) for hook in self.hooks}

    @property
    def alone_seconds(self) -> float:
        """Of a step without communication."""
        baseline = self.predictions[BASELINE]
        return baseline.step_seconds - baseline.exposed_seconds

    def curve_sizes(self) -> list[int]:
        """World sizes from two nodes to beyond that of the network."""
        per_node = self.network.ranks_per_node
        longest = max(self.network.size, _LONG_CURVE * per_node)
        doublings = range(1, math.floor(math.log2(longest / per_node)) + 1)
        return sorted({self.network.size, *(per_node << power for power in doublings)})

    def curve(self, hook: str, sizes: Sequence[int]) -> list[float]:
        """Seconds per step in worlds of ``sizes``."""
        return [self._on(replace(self.network, size=size), hook).step_seconds for size in sizes]

    def pays(self, hook: str) -> PayingRates | None:
        """At which rates of links ``hook`` beats the plain average; None: at none."""
        return paying_rates(lambda rate: self._pays(hook, rate))

    @property
    def advice(self) -> str:
        """Which hook to take, in a sentence or two."""
        baseline = self.predictions[BASELINE]
        best = min(self.predictions, key=lambda hook: self.predictions[hook].step_seconds)
        gain = baseline.step_seconds / self.predictions[best].step_seconds
        rate = format_rate(self.network.link.bits_per_second)
        where = f"among {self.network.size} ranks at {rate}"
        if len(self.predictions) == 1:
            return f"There is nothing to compare {BASELINE} with: name other hooks."
        if best == BASELINE:
            return f"Stay with {BASELINE}: {where} none of these is faster, and it loses nothing."
        if gain < _WORTH_IT:
            return (
                f"Stay with {BASELINE}: {where} {best} would make a step {gain:.2f} times as fast, "
                "which is too little to lose anything for."
            )
        return (
            f"Take {best}: {where} it makes a step {gain:.1f} times as fast as {BASELINE}. Whether "
            "the model learns as well with it, training has to show."
        )

    def to_json(self) -> dict[str, Any]:
        """In JSON's types. "pays": the ends of that interval, in bits per second, null: no end."""
        sizes = self.curve_sizes()
        return {
            "network": asdict(self.network),
            "backend": self.backend.name,
            "alone_seconds": self.alone_seconds,
            "hooks": {
                hook: asdict(prediction)
                | {
                    "pays": _ends(self.pays(hook)),
                    "curve_seconds": self.curve(hook, sizes),
                }
                for hook, prediction in self.predictions.items()
            },
            "curve_ranks": sizes,
            "advice": self.advice,
        }

    def _on(self, network: Network, hook: str) -> Prediction:
        return predict(self.hooks[hook], network, self.backend, cores=self.cores, speed=self.speed)

    def _pays(self, hook: str, bits_per_second: float) -> bool:
        link = replace(self.network.link, bits_per_second=bits_per_second)
        slower = replace(self.network, link=link)
        return self._on(slower, hook).step_seconds < self._on(slower, BASELINE).step_seconds


def _ends(rates: PayingRates | None) -> dict[str, float | None] | None:
    if rates is None:
        return None
    return {
        "above": rates.above,
        "below": rates.below if math.isfinite(rates.below) else None,
    }
