"""From what was measured to a step on a network that is not there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.costs.network import Backend, Network
from commhooks.costs.timeline import play
from commhooks.lab.simulation.dry_runs import Rehearsals

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True)
class Prediction:
    """Means per step. Bytes are those that the busiest rank sends, see
    :mod:`commhooks.comm.wire`.
    """

    step_seconds: float
    """Forward and backward, all averages written back; without the optimizer."""
    backward_seconds: float
    exposed_seconds: float
    """Of them, what there would not be without communication."""
    gradient_bytes: int
    wire_bytes: float
    events: int
    """What it took to find out."""


def predict(
    rehearsals: Rehearsals,
    network: Network,
    backend: Backend,
    *,
    cores: float = math.inf,
    speed: float = 1.0,
) -> Prediction:
    """A step of ``network.size`` ranks.

    ``cores``: those that a rank has for all its threads, where communication uses them as well.
    ``speed``: how many times faster than here the ranks compute.
    """
    kinds = [(share, script.faster(speed)) for share, script in rehearsals.at(network.size)]
    timings = [play(script, network, backend, cores) for _, script in kinds]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(share * value for (share, _), value in zip(kinds, values, strict=True))

    return Prediction(
        step_seconds=mean([timing.step_seconds for timing in timings]),
        backward_seconds=mean([timing.backward_seconds for timing in timings]),
        exposed_seconds=mean([timing.exposed_seconds for timing in timings]),
        gradient_bytes=kinds[0][1].gradient_bytes,
        wire_bytes=mean([script.wire_bytes(network.nodes) for _, script in kinds]),
        events=sum(timing.events for timing in timings),
    )
