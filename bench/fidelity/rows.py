"""The runs of each hook at its present defaults, and plain averaging on the same data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.fidelity.record import Record, Run
from bench.fidelity.tasks import ALL_TASKS
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook, trained_hooks

__all__ = ["Row", "mean", "plain_runs", "row_of", "rows", "spread"]


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
    found = (row_of(record, task, trained) for trained in trained_hooks())
    return [row for row in found if row is not None]


def row_of(record: Record, task: str, trained: TrainedHook) -> Row | None:
    """Return the row of a hook, or None if it has not been run."""
    reference = {run.seed: run for run in _plain(record, task, _reference_recipe(trained, task))}
    recipe = trained.recipe or ALL_TASKS[task].usual
    config = trained.create().to_config()
    runs = [run for run in record.runs(task, trained.hook, config, recipe) if run.seed in reference]
    return Row(trained, runs, [reference[run.seed] for run in runs]) if runs else None


def plain_runs(record: Record, task: str) -> dict[str, list[Run]]:
    """Return the reference runs by recipe, the task's usual recipe first."""
    special = [_reference_recipe(trained, task) for trained in trained_hooks()]
    recipes = dict.fromkeys([ALL_TASKS[task].usual, *special])
    found = {recipe: _plain(record, task, recipe) for recipe in recipes}
    return {recipe: runs for recipe, runs in found.items() if runs}


def spread(runs: Sequence[Run]) -> float:
    """Return the range of losses, relative to their mean."""
    losses = [run.loss for run in runs]
    return (max(losses) - min(losses)) / mean(losses)


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def _plain(record: Record, task: str, recipe: str) -> list[Run]:
    return record.runs(task, REFERENCE, TrainedHook(REFERENCE).create().to_config(), recipe)


def _reference_recipe(trained: TrainedHook, task: str) -> str:
    return trained.reference_recipe or ALL_TASKS[task].usual
