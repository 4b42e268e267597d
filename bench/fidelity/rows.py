"""Each hook's runs at its present defaults, beside plain averaging on the same data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.fidelity.record import Record, Run
from bench.fidelity.subjects import REFERENCE, Subject, subjects
from bench.fidelity.tasks import TASKS

__all__ = ["Row", "mean", "plain_runs", "rows", "spread"]


@dataclass(frozen=True)
class Row:
    """A hook's runs of one task, and those that they are compared with, by seed."""

    subject: Subject
    runs: Sequence[Run]
    plain: Sequence[Run]

    @property
    def changes(self) -> list[float]:
        """Of the validation loss, by seed, as a share of that of plain averaging."""
        return [run.loss / plain.loss - 1 for run, plain in zip(self.runs, self.plain, strict=True)]

    @property
    def change(self) -> float:
        """The mean over seeds."""
        return mean(self.changes)

    @property
    def is_within(self) -> bool:
        """Whether that is acceptable."""
        return self.change <= self.subject.tolerance

    @property
    def byte_share(self) -> float:
        """Of the bytes that plain averaging sends."""
        return mean(run.wire_bytes for run in self.runs) / mean(p.wire_bytes for p in self.plain)


def rows(record: Record, task: str) -> list[Row]:
    """Of the hooks that have been run, by name."""
    plain = plain_runs(record, task)
    found = []
    for subject in subjects():
        recipe = subject.recipe or TASKS[task].usual
        reference = {run.seed: run for run in plain.get(_reference_recipe(subject, task), [])}
        runs = [
            run
            for run in record.runs(task, subject.hook, subject.create().to_config(), recipe)
            if run.seed in reference
        ]
        if runs:
            found.append(Row(subject, runs, [reference[run.seed] for run in runs]))
    return found


def plain_runs(record: Record, task: str) -> dict[str, list[Run]]:
    """The references, by recipe; the task's usual one first."""
    config = Subject(REFERENCE).create().to_config()
    special = [_reference_recipe(subject, task) for subject in subjects()]
    recipes = dict.fromkeys([TASKS[task].usual, *special])
    found = {recipe: record.runs(task, REFERENCE, config, recipe) for recipe in recipes}
    return {recipe: runs for recipe, runs in found.items() if runs}


def spread(runs: Sequence[Run]) -> float:
    """From the lowest to the highest loss, as a share of their mean."""
    losses = [run.loss for run in runs]
    return (max(losses) - min(losses)) / mean(losses)


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def _reference_recipe(subject: Subject, task: str) -> str:
    return subject.reference_recipe or TASKS[task].usual
