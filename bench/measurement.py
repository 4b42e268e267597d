"""One row of the benchmark of hooks: verified, timed beside others, and compared with its floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import steps
from bench.conftest import median_of
from bench.measured_hooks import MeasuredHook
from commhooks.cluster import Ranks
from commhooks.comm.wire import all_reduce_bytes

__all__ = ["Place", "measure"]

WARM_UP = 1  # besides the step that is verified


@dataclass(frozen=True)
class Place:
    """Where hooks are measured: on ``ranks`` that can send ``limit`` bytes per second each."""

    ranks: Ranks
    limit: float
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the wrappers."""
    rounds: int = 5


def measure(
    benchmark: Any, place: Place, measured: MeasuredHook, beside: Sequence[str] = ("bare", "torch")
) -> None:
    """Verify the first step, then time all wrappers in turn, round by round.

    Fills ``extra_info``, see README.md for its columns. ``beside``: the other wrappers to time,
    which include "bare".
    """
    ranks = place.ranks
    wrappers = list(dict.fromkeys([*beside, measured.wrapper]))
    gradient_bytes = ranks(steps.prepare, place.model, wrappers, place.options)[0]
    for name in wrappers:
        for _ in range(1 + (measured.first_step if name == measured.wrapper else 0)):
            ranks(steps.backward, name, True)
    error = max(ranks(steps.error, measured.wrapper, measured.averages))
    assert error <= measured.largest_error
    median = _time_in_turn(benchmark, place, wrappers, measured.wrapper)
    wire_bytes, exposed = ranks(steps.sent, measured.wrapper)[0]
    own, bare = median[measured.wrapper], median["bare"]
    floor = bare + wire_bytes / place.limit
    plain_bytes = all_reduce_bytes(gradient_bytes, ranks.world_size)
    benchmark.extra_info.update(
        gradient_bytes=gradient_bytes,
        wire_bytes=wire_bytes,
        ratio=plain_bytes / wire_bytes if wire_bytes else None,
        error=error if measured.averages else None,
        seconds=own,
        bare_seconds=bare,
        exposed_seconds=exposed,
        bandwidth=wire_bytes / own,
        limit_bandwidth=place.limit,
        floor_seconds=floor,
        share_of_limit=floor / own,
    )
    if "torch" in median:
        benchmark.extra_info["ratio_to_torch"] = own / median["torch"]


def _time_in_turn(
    benchmark: Any, place: Place, wrappers: Sequence[str], measured: str
) -> dict[str, float]:
    """Return the median seconds of a backward on the slowest rank, by wrapper."""
    seconds: dict[str, list[float]] = {name: [] for name in wrappers}

    def run(name: str) -> None:
        seconds[name].append(max(place.ranks(steps.backward, name, True)))

    def run_others() -> None:
        for name in wrappers:
            if name != measured:
                run(name)

    benchmark.pedantic(
        run, (measured,), setup=run_others, rounds=place.rounds, warmup_rounds=WARM_UP, iterations=1
    )
    return {name: median_of(values, WARM_UP) for name, values in seconds.items()}
