"""The runs of each hook at its present defaults, and plain averaging on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from bench.fidelity.record import Record, Run
from bench.fidelity.tasks import ALL_TASKS, TASKS
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook, trained_hooks, trained_on

__all__ = ["Row", "mean", "measured_tasks", "plain_runs", "row_of", "rows", "spread"]


@dataclass(frozen=True)
class Row:
    """The runs of a hook on one task, and the runs that they are compared with, by seed.

    ``usual``: plain averaging with the usual optimizer of the task; ``plain``: with that which the
    hook is compared with.
    """

    trained: TrainedHook
    runs: Sequence[Run]
    plain: Sequence[Run]
    usual: Sequence[Run]

    @property
    def changes(self) -> list[float]:
        """Return the relative change of the validation loss against plain averaging, by seed."""
        return [run.loss / plain.loss - 1 for run, plain in zip(self.runs, self.plain, strict=True)]

    @property
    def change(self) -> float:
        """Return the mean change over seeds."""
        return mean(self.changes)

    @property
    def changes_to_usual(self) -> list[float]:
        """Return the change against plain averaging with the task's usual optimizer, by seed."""
        return [run.loss / plain.loss - 1 for run, plain in zip(self.runs, self.usual, strict=True)]

    @property
    def change_to_usual(self) -> float:
        """Return the mean of these changes."""
        return mean(self.changes_to_usual)

    @property
    def byte_share(self) -> float:
        """Return the bytes that the hook sends, as a share of plain averaging."""
        return mean(run.wire_bytes for run in self.runs) / mean(p.wire_bytes for p in self.plain)


def measured_tasks(record: Record) -> list[str]:
    """Return the published tasks on which a hook has been run."""
    return [task for task in TASKS if rows(record, task)]


def rows(record: Record, task: str) -> list[Row]:
    """Return the rows of all hooks that have been run, by name, then those of variants."""
    found = (row_of(record, task, trained) for trained in trained_on(task))
    return [row for row in found if row is not None]


def row_of(record: Record, task: str, trained: TrainedHook) -> Row | None:
    """Return the row of a hook, or None if it has not been run."""
    usual_recipe = ALL_TASKS[task].usual
    plain, usual = (
        {run.seed: run for run in _plain(record, task, recipe)}
        for recipe in (trained.reference_recipe or usual_recipe, usual_recipe)
    )
    config = trained.create().to_config()
    runs = record.runs(task, trained.hook, config, trained.recipe or usual_recipe)
    runs = [run for run in runs if run.seed in plain.keys() & usual.keys()]
    if not runs:
        return None
    references = ([of_seed[run.seed] for run in runs] for of_seed in (plain, usual))
    return Row(trained, runs, *references)


def plain_runs(record: Record, task: str) -> dict[str, list[Run]]:
    """Return the reference runs by recipe, the task's usual recipe first."""
    usual = ALL_TASKS[task].usual
    special = (trained.reference_recipe or usual for trained in trained_hooks())
    recipes = dict.fromkeys([usual, *special])
    found = {recipe: _plain(record, task, recipe) for recipe in recipes}
    return {recipe: runs for recipe, runs in found.items() if runs}


def spread(runs: Sequence[Run]) -> float:
    """Return the range of losses, relative to their mean."""
    losses = [run.loss for run in runs]
    return (max(losses) - min(losses)) / mean(losses)


def _plain(record: Record, task: str, recipe: str) -> list[Run]:
    return record.runs(task, REFERENCE, TrainedHook(REFERENCE).create().to_config(), recipe)
