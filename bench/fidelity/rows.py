"""The runs of each hook at its present defaults, and plain averaging on the same data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.fidelity.record import Record, Run
from bench.fidelity.tasks import TASKS
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook, trained_hooks

__all__ = ["Row", "mean", "plain_runs", "rows", "spread"]


@dataclass(frozen=True)
class Row:
    """The runs of a hook on one task, and the runs that they are compared with, by seed."""

    trained: TrainedHook
    runs: Sequence[Run]
    plain: Sequence[Run]

    @property
    def changes(self) -> list[float]:
        """Return the relative change of the validation loss against plain averaging, by seed."""
        return [run.loss / plain.loss - 1 for run, plain in zip(self.runs, self.plain, strict=True)]

    @property
    def change(self) -> float:
        """Return the mean change over seeds."""
        return mean(self.changes)

    @property
    def is_within(self) -> bool:
        """Whether the mean change is within the tolerance."""
        return self.change <= self.trained.tolerance

    @property
    def byte_share(self) -> float:
        """Return the bytes that the hook sends, as a share of plain averaging."""
        return mean(run.wire_bytes for run in self.runs) / mean(p.wire_bytes for p in self.plain)


def rows(record: Record, task: str) -> list[Row]:
    """Return the rows of all hooks that have been run, by name."""
    plain = plain_runs(record, task)
    found = []
    for trained in trained_hooks():
        recipe = trained.recipe or TASKS[task].usual
        reference = {run.seed: run for run in plain.get(_reference_recipe(trained, task), [])}
        runs = [
            run
            for run in record.runs(task, trained.hook, trained.create().to_config(), recipe)
            if run.seed in reference
        ]
        if runs:
            found.append(Row(trained, runs, [reference[run.seed] for run in runs]))
    return found


def plain_runs(record: Record, task: str) -> dict[str, list[Run]]:
    """Return the reference runs by recipe, the task's usual recipe first."""
    config = TrainedHook(REFERENCE).create().to_config()
    special = [_reference_recipe(trained, task) for trained in trained_hooks()]
    recipes = dict.fromkeys([TASKS[task].usual, *special])
    found = {recipe: record.runs(task, REFERENCE, config, recipe) for recipe in recipes}
    return {recipe: runs for recipe, runs in found.items() if runs}


def spread(runs: Sequence[Run]) -> float:
    """Return the range of losses, relative to their mean."""
    losses = [run.loss for run in runs]
    return (max(losses) - min(losses)) / mean(losses)


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def _reference_recipe(trained: TrainedHook, task: str) -> str:
    return trained.reference_recipe or TASKS[task].usual
