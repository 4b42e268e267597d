"""Predict a step on a network that is not available, from dry runs of a hook in a few world sizes.

Note [Extrapolation to larger worlds]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The bytes of a tensor that a hook sends do not depend on the number of ranks N, or they shrink as
1/N when a rank sends the part that it has averaged, or they grow with N when there is something for
each rank. Local work grows with N when something is done for each peer.

Some hooks use other collectives in larger worlds: sparse ones sum where that sends less than
gathering. So an extrapolation only counts at sizes where the hook's own formula,
:meth:`CommHook.wire_bytes`, gives the same bytes. Elsewhere the hook is run dry at that size, if
what it receives fits in memory; and larger sizes are extrapolated from the runs with the
collectives of the largest one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated

import numpy as np

from commhooks.costs.backends import Backend
from commhooks.costs.network import Network
from commhooks.costs.step_trace import BucketTrace, StepTrace, merged_work
from commhooks.costs.timeline import replay
from commhooks.costs.units import format_bytes
from commhooks.errors import CommHookError, reason_of
from commhooks.hook.options import Made

_TERMS: tuple[Callable[[float], float], ...] = (lambda _: 1.0, lambda n: 1 / n, lambda n: n)
_FORMS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))  # simplest first
_TOLERANCE = 0.01  # rounding up to whole blocks changes bytes by less
_LARGEST = 32
"""Ranks of the largest dry run of every hook: what an all-gather receives has to fit in memory."""
_DOUBLINGS = 18  # of the number of nodes, where formulas are asked
_RECEIVED, _SMALL = 4, 1 << 26
"""A larger dry run may receive this many times the bytes of the gradients, or this many bytes."""


def dry_run_sizes(world_sizes: Sequence[int], ranks_per_node: int) -> list[int]:
    """Return the small ones of ``world_sizes``; for others three sizes to extrapolate from."""
    largest = max(8, _LARGEST // ranks_per_node) * ranks_per_node
    exact = {size for size in world_sizes if size <= largest}
    others = {2 * ranks_per_node, 4 * ranks_per_node, largest}
    return sorted(exact if max(world_sizes) <= largest else exact | others)


@dataclass(frozen=True)
class DryRuns:
    """Step traces of one hook by world size.

    Each size has one trace for every kind of step, with the share of steps that are of this kind.
    """

    by_size: Mapping[Annotated[int, Made(int)], Sequence[tuple[float, StepTrace]]]  # keys of JSON
    ranks_per_node: int
    confirmed: Sequence[int] = ()
    """Other sizes, for which the hook's formula gives the bytes of the extrapolation."""
    failures: Mapping[Annotated[int, Made(int)], str] = field(default_factory=dict)
    """The reasons why other sizes cannot be predicted."""

    @cached_property
    def _extrapolated(self) -> dict[int, list[tuple[float, StepTrace]]]:
        """Extrapolations so far, by size: every rate of the links needs them."""
        return {}

    def has(self, size: int) -> bool:
        """Return whether ``size`` was run dry, or is confirmed, or lies between confirmed sizes.

        These must not be farther apart than twice, with no dry run between them.
        """
        below = max((known for known in self.confirmed if known <= size), default=0)
        above = min((known for known in self.confirmed if known >= size), default=math.inf)
        alike = above <= 2 * below and not any(below < known < above for known in self.by_size)
        return size in self.by_size or alike

    def at(self, size: int) -> list[tuple[float, StepTrace]]:
        """Return the shares and traces for ``size`` ranks, a multiple of ``ranks_per_node``.

        Raises CommHookError if :meth:`has` returns False.
        """
        if size in self.by_size:
            return list(self.by_size[size])
        if not self.has(size):
            reason = self.failures.get(size, "this size has not been measured")
            raise CommHookError(f"cannot be predicted among {size} ranks: {reason}")
        if size not in self._extrapolated:
            self._extrapolated[size] = self.extrapolate(size)
        return self._extrapolated[size]

    def extrapolate(self, size: int) -> list[tuple[float, StepTrace]]:
        """Extrapolate from the runs of smaller worlds: Note [Extrapolation to larger worlds].

        Those count whose kinds of steps are those of the largest one.
        """
        sizes = [n for n in sorted(self.by_size) if 2 * self.ranks_per_node <= n < size]
        shares = {n: [share for share, _ in self.by_size[n]] for n in sizes}
        sizes = [n for n in sizes if shares[n] == shares[sizes[-1]]]
        found = []
        for kind in zip(*(self.by_size[n] for n in sizes), strict=True):
            share, trace = kind[-1]
            extrapolated = []
            for known in zip(*(each.buckets for _, each in kind), strict=True):
                alike = [i for i, each in enumerate(known) if each.structure == known[-1].structure]
                known_sizes = [sizes[i] for i in alike]
                seconds = partial(seconds_at, size, known_sizes)
                nbytes = partial(bytes_at, size, known_sizes)
                extrapolated.append(merged_work([known[i] for i in alike], seconds, nbytes))
            found.append((share, replace(trace, buckets=tuple(extrapolated))))
        return found


def complete(
    runs: DryRuns,
    world_sizes: Sequence[int],
    stated: Callable[[int], float | None],
    run: Callable[[int], Sequence[tuple[float, StepTrace]]],
) -> DryRuns:
    """Add what is needed to predict ``world_sizes``: Note [Extrapolation to larger worlds].

    Args:
        runs: Dry runs of :func:`dry_run_sizes`.
        world_sizes: The sizes to predict.
        stated: Returns the bytes per step by the hook's formula among so many ranks; None if the
            hook has no formula.
        run: Runs the hook dry among so many ranks.

    Failures are noted for the size.
    """
    by_size, confirmed, failures = dict(runs.by_size), list[int](), dict[int, str]()
    last, asked = max(by_size), max(world_sizes)
    if asked <= last:
        return runs
    limit = max(_SMALL, _RECEIVED * by_size[last][0][1].gradient_bytes)
    doublings = {runs.ranks_per_node << power for power in range(_DOUBLINGS)}
    for size in sorted(size for size in {*world_sizes, *doublings} if size > last):
        try:
            expected, nodes = stated(size), size // runs.ranks_per_node
            kinds = replace(runs, by_size=by_size).extrapolate(size)
            found = math.fsum(share * trace.wire_bytes(nodes) for share, trace in kinds)
            # No collective receives more than it sends, but for a factor of N / (N - 1).
            received = found if expected is None else expected
            if expected is not None and math.isclose(expected, found, rel_tol=_TOLERANCE):
                confirmed.append(size)
            elif size <= asked and received <= limit:
                by_size[size] = run(size)
            elif size <= asked:
                failures[size] = (
                    "its wire_bytes() does not confirm what smaller worlds suggest, and a dry run "
                    f"among so many ranks would receive {format_bytes(received)}, more than "
                    f"{format_bytes(limit)}"
                )
        except CommHookError as error:
            failures[size] = reason_of(error)
    return replace(runs, by_size=by_size, confirmed=confirmed, failures=failures)


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

    Raises CommHookError if the dry runs do not tell what the hook sends among so many ranks.
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

    The line does not fall, and is level if there is one size. Measured times scatter, and a line
    fitted to all of them would take its slope from the small sizes.
    """
    known = sorted(zip(sizes, values, strict=True))
    (first, low), (last, high) = known[0], known[-1]
    slope = max(0.0, (high - low) / max(1, last - first))
    return low + slope * (size - first)
