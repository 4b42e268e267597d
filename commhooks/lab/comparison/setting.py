"""Entries side by side in one setting: over loopback, over one link, or on the hosts of a job."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from commhooks.lab.comparison import remote
from commhooks.lab.comparison.entry import BARE
from commhooks.lab.comparison.plan import Task
from commhooks.lab.comparison.remote import Block, FirstSteps
from commhooks.lab.comparison.result import TrainingPoint
from commhooks.lab.comparison.trial import StepTimes, TrialCosts

__all__ = ["Figures", "RankCaller", "Setting"]


class RankCaller(Protocol):
    """Runs functions on all ranks, see :class:`commhooks.cluster.Ranks`."""

    world_size: int

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results of ``fn(rank, *args, **kwargs)`` by rank."""

    def restart(self) -> None:
        """Make the ranks usable after an error, without the state of earlier calls."""


@dataclass(frozen=True)
class Figures:
    """The measurements of one entry in one setting: medians over steps of the slowest rank."""

    step_seconds: float
    step_spread_seconds: float
    backward_seconds: float
    exposed_seconds: float
    costs: TrialCosts


@dataclass
class Setting:
    """What has been measured in one setting so far, by the names of entries."""

    name: str
    bits_per_second: float | None = None
    first_steps: dict[str, FirstSteps] = field(default_factory=dict)
    training: dict[str, list[TrainingPoint]] = field(default_factory=dict)
    _blocks: dict[str, list[Block]] = field(default_factory=dict)

    def times(self, name: str) -> list[StepTimes]:
        """Return all timed steps of an entry, on the slowest rank of each."""
        return [times for block in self._blocks.get(name, ()) for times in block.times]

    def figures(self, name: str) -> Figures | None:
        """Return the figures of an entry; None if it or the bare model has not been measured."""
        blocks, bare = self._blocks.get(name), self._blocks.get(BARE.name)
        if not blocks or not bare:
            return None
        seconds, backward = zip(*self.times(name), strict=True)
        return Figures(
            step_seconds=statistics.median(seconds),
            step_spread_seconds=_spread(seconds),
            backward_seconds=statistics.median(backward),
            exposed_seconds=statistics.median(
                _median_step(block) - _median_step(other)
                for block, other in zip(blocks, bare, strict=False)  # an interrupt may leave one
            ),
            costs=_mean_costs(blocks),
        )

    def run(self, ranks: RankCaller, task: Task, train: str) -> float | None:
        """Do a task; return the bytes of a step if it tells them."""
        name = task.entry.name
        match task.kind:
            case "verifying":
                first = _worst(ranks(remote.verify, task.entry))
                self.first_steps[name] = first
                return first.wire_bytes
            case "measuring":
                by_rank = ranks(remote.time_block, task.entry, task.done, task.steps)
                steps = zip(*(block.times for block in by_rank), strict=True)
                slowest = tuple(map(StepTimes.slowest, steps))
                block = Block(slowest, by_rank[0].costs)
                self._blocks.setdefault(name, []).append(block)
                return block.costs.wire_bytes
            case "training":
                if task.done == 0:
                    ranks(remote.begin_training, task.entry, train)
                for left in range(task.steps, 0, -1):
                    point = ranks(remote.train, left == 1)[0]
                self.training.setdefault(name, []).append(point)
                return None

    def forget(self, task: Task) -> None:
        """Drop what has been measured of the task's kind with its entry, which has failed."""
        name = task.entry.name
        self.training.pop(name, None)
        if task.kind != "training":
            self._blocks.pop(name, None)


def _worst(by_rank: Sequence[FirstSteps]) -> FirstSteps:
    errors = [first.error for first in by_rank if first.error is not None]
    peaks = [first.peak_bytes for first in by_rank if first.peak_bytes is not None]
    worst = max(errors, key=_nan_last, default=None)
    return FirstSteps(worst, max(peaks, default=None), by_rank[0].wire_bytes)


def _mean_costs(blocks: Sequence[Block]) -> TrialCosts:
    steps = [len(block.times) for block in blocks]
    exposed = [block.costs.exposed_seconds for block in blocks]
    known = [seconds for seconds in exposed if seconds is not None]
    return TrialCosts(
        statistics.fmean([block.costs.wire_bytes for block in blocks], steps),
        statistics.fmean(known, steps) if known else None,
    )


def _median_step(block: Block) -> float:
    return statistics.median(times.step for times in block.times)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
