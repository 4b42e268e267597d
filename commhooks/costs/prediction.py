"""Predicts a step on a network that is not available, from dry runs of a hook."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.costs.dry_runs import DryRuns
from commhooks.costs.network import Backend, Network
from commhooks.costs.step_trace import StepTrace
from commhooks.costs.timeline import replay

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True)
class Prediction:
    """Means per step. Bytes are those of the busiest rank, see :mod:`commhooks.comm.wire`."""

    step_seconds: float
    """Forward and backward until all averages are written back, without the optimizer."""
    backward_seconds: float
    exposed_seconds: float
    """The part of ``backward_seconds`` that communication adds."""
    gradient_bytes: int
    wire_bytes: float
    events: int
    """The number of simulated events."""


def predict(
    dry_runs: DryRuns,
    network: Network,
    backend: Backend,
    *,
    cores: float = math.inf,
    speed: float = 1.0,
) -> Prediction:
    """Predict a step of ``network.size`` ranks.

    The threads of a rank share ``cores`` cores, also with the communication of a backend that uses
    them. The ranks compute ``speed`` times as fast as the machine of the dry runs.

    Exchanges that take several steps are replayed by themselves, as if they shared nothing with
    these steps. What an exchange takes longer than the steps until its result is awaited is waited
    for.

    Raises CommHookError if the collectives of the hook depend on the world size and no dry run had
    this one.
    """
    kinds = [(share, trace.faster(speed)) for share, trace in dry_runs.at(network.size)]
    timings = [replay(trace, network, backend, cores) for _, trace in kinds]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(share * value for (share, _), value in zip(kinds, values, strict=True))

    step_seconds = mean([timing.step_seconds for timing in timings])
    waited = mean(
        [
            max(
                0.0,
                _exchange_seconds(trace, network, backend, cores) - _steps(trace) * step_seconds,
            )
            for _, trace in kinds
        ]
    )
    return Prediction(
        step_seconds=step_seconds + waited,
        backward_seconds=mean([timing.backward_seconds for timing in timings]) + waited,
        exposed_seconds=mean([timing.exposed_seconds for timing in timings]) + waited,
        gradient_bytes=kinds[0][1].gradient_bytes,
        wire_bytes=mean([trace.wire_bytes(network.nodes) for _, trace in kinds]),
        events=sum(timing.events for timing in timings),
    )


def _exchange_seconds(trace: StepTrace, network: Network, backend: Backend, cores: float) -> float:
    """Return how long the exchanges take that begin in a step."""
    exchanges = trace.of_exchanges()
    if not exchanges.buckets:
        return 0.0
    return replay(exchanges, network, backend, cores).backward_seconds


def _steps(trace: StepTrace) -> int:
    """Return how many steps later the first of these exchanges is awaited."""
    steps = [exchange.steps for bucket in trace.buckets for exchange in bucket.exchanges]
    return min(steps, default=0)
