"""The figures that the package shows: one per hook and task. The docs take theirs from the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import commhooks
from bench.fidelity.record import Record
from bench.fidelity.rows import Row, rows
from bench.fidelity.tasks import TASKS

__all__ = ["PACKAGED", "by_hook", "figures", "publish"]

PACKAGED = Path(commhooks.__file__).parent / "hook" / "fidelity.json"
Figures: TypeAlias = dict[str, dict[str, float | int]]


def publish(record: Record) -> None:
    """Write ``commhooks/hook/fidelity.json``."""
    PACKAGED.write_text(json.dumps(figures(record), indent=1) + "\n")


def figures(record: Record) -> Figures:
    """Return the change of the validation loss in percent, by hook and task.

    Tasks on which a hook was not run are missing. ``seeds``: the number of seeds, of the task with
    the fewest.
    """
    measured = by_hook(record)
    return {
        hook: {task: round(100 * row.change, 1) for task, row in found.items()}
        | {"seeds": min(len(row.runs) for row in found.values())}
        for hook, found in sorted(measured.items())
    }


def by_hook(record: Record) -> dict[str, dict[str, Row]]:
    """Return the runs of each hook at its present defaults, by task."""
    found: dict[str, dict[str, Row]] = {}
    for task in TASKS:
        for row in rows(record, task):
            if not row.trained.name:
                found.setdefault(row.trained.hook, {})[task] = row
    return found
