"""Predict a step on a network that is not available, from dry runs of a hook in a few world sizes.

Note [Extrapolation to larger worlds]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The bytes of a tensor that a hook sends do not depend on the number of ranks N, or they shrink as
1/N when a rank sends the part that it has averaged, or they grow with N when there is something for
each rank. Local work grows with N when something is done for each peer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated

import numpy as np

from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace, StepTrace, merged_work
from commhooks.costs.timeline import replay
from commhooks.errors import CommHookError
from commhooks.hook.options import Made

_TERMS: tuple[Callable[[float], float], ...] = (lambda _: 1.0, lambda n: 1 / n, lambda n: n)
_FORMS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))  # simplest first
_TOLERANCE = 0.01  # rounding up to whole blocks changes bytes by less
_LARGEST = 32
"""Ranks of the largest dry run: what an all-gather receives has to fit in memory."""


def dry_run_sizes(world_sizes: Sequence[int], ranks_per_node: int) -> list[int]:
    """Return the small ones of ``world_sizes``, and three sizes to extrapolate from."""
    largest = max(8, _LARGEST // ranks_per_node) * ranks_per_node
    exact = {size for size in world_sizes if size <= largest}
    return sorted(exact | {2 * ranks_per_node, 4 * ranks_per_node, largest})


@dataclass(frozen=True)
class DryRuns:
    """Step traces of one hook by world size.

    Each size has one trace for every kind of step, with the share of steps that are of this kind.
    """

    by_size: Mapping[Annotated[int, Made(int)], Sequence[tuple[float, StepTrace]]]  # keys of JSON
    ranks_per_node: int

    @cached_property
    def _extrapolated(self) -> dict[int, list[tuple[float, StepTrace]]]:
        """Extrapolations so far, by size: every rate of the links needs them."""
        return {}

    def at(self, size: int) -> list[tuple[float, StepTrace]]:
        """Return the shares and traces for ``size`` ranks, a multiple of ``ranks_per_node``.

        Raises CommHookError if the collectives of the hook depend on the world size.
        """
        if size in self.by_size:
            return list(self.by_size[size])
        if size not in self._extrapolated:
            self._extrapolated[size] = self._extrapolate(size)
        return self._extrapolated[size]

    def _extrapolate(self, size: int) -> list[tuple[float, StepTrace]]:
        """See Note [Extrapolation to larger worlds]."""
        sizes = [known for known in self.by_size if known >= 2 * self.ranks_per_node]
        found = []
        for kind in zip(*(self.by_size[known] for known in sizes), strict=True):
            share, trace = kind[0]
            extrapolated = []
            for known in zip(*(each.buckets for _, each in kind), strict=True):
                if len({each.structure for each in known}) > 1:
                    structures = {n: each.structure for n, each in zip(sizes, known, strict=True)}
                    raise CommHookError(
                        f"cannot predict the hook among {size} ranks: its collectives depend on "
                        f"the world size, {structures}; simulate at most {_LARGEST} ranks"
                    )
                seconds, nbytes = partial(seconds_at, size, sizes), partial(bytes_at, size, sizes)
                extrapolated.append(merged_work(known, seconds, nbytes))
            found.append((share, replace(trace, buckets=tuple(extrapolated))))
        return found


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
    these steps. If an exchange takes longer than the steps until its result is awaited, the step
    waits for the rest.

    Raises CommHookError if the collectives of the hook depend on the world size and no dry run had
    this one.
    """
    kinds = [(share, trace.faster(speed)) for share, trace in dry_runs.at(network.size)]
    timings = [replay(trace, network, backend, cores) for _, trace in kinds]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(share * value for (share, _), value in zip(kinds, values, strict=True))

    step_seconds = mean([timing.step_seconds for timing in timings])

    def waited_for(exchanges: tuple[BucketTrace, ...]) -> float:
        """Return the rest of the exchanges when the first of them is awaited."""
        together = StepTrace(exchanges, 0.0, is_native=False)
        seconds = replay(together, network, backend, cores).backward_seconds
        return max(0.0, seconds - min(each.steps for each in exchanges) * step_seconds)

    waited = mean([waited_for(trace.exchanges) if trace.exchanges else 0.0 for _, trace in kinds])
    return Prediction(
        step_seconds=step_seconds + waited,
        backward_seconds=mean([timing.backward_seconds for timing in timings]) + waited,
        exposed_seconds=mean([timing.exposed_seconds for timing in timings]) + waited,
        gradient_bytes=kinds[0][1].gradient_bytes,
        wire_bytes=mean([trace.wire_bytes(network.nodes) for _, trace in kinds]),
        events=sum(timing.events for timing in timings),
    )


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
