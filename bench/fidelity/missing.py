"""Run what a record lacks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from bench.fidelity.record import Record, Run
from bench.fidelity.tasks import ALL_TASKS
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook
from bench.fidelity.training import RANKS, train
from commhooks.testing import run_ranks

__all__ = ["run_missing"]

_TIMEOUT = 3600.0  # seconds; a run takes 15 on an idle machine


def run_missing(
    task: str,
    chosen: Sequence[TrainedHook],
    seed: int,
    record: Record,
    path: Path,
    *,
    again: bool = False,
) -> None:
    """Train with the hooks and their references where ``record`` has no such run; save each run.

    ``again``: repeat the runs that it has, except those of references.
    """
    for trained in _with_references(task, chosen):
        if _run(task, trained, seed, record, again=again):
            record.save(path)


def _with_references(task: str, chosen: Sequence[TrainedHook]) -> list[TrainedHook]:
    """Return the hooks, after the plain averaging that each is compared with."""
    usual = ALL_TASKS[task].usual
    recipes = dict.fromkeys(trained.reference_recipe or usual for trained in chosen)
    return [*(TrainedHook(REFERENCE, recipe=recipe) for recipe in recipes), *chosen]


def _run(task: str, trained: TrainedHook, seed: int, record: Record, *, again: bool) -> bool:
    """Train once and add the run to the record. Return whether it was missing."""
    config, recipe = trained.create().to_config(), trained.recipe or ALL_TASKS[task].usual
    has_run = seed in {run.seed for run in record.runs(task, trained.hook, config, recipe)}
    if has_run and not (again and trained.hook != REFERENCE):
        return False
    start = time.perf_counter()
    results = run_ranks(train, RANKS, task, trained, seed, timeout=_TIMEOUT)
    accuracies = [o.accuracy for o in results if o.accuracy is not None]
    run = Run(
        task,
        trained.hook,
        config,
        recipe,
        seed,
        loss=statistics.mean(o.loss for o in results),
        accuracy=statistics.mean(accuracies) if accuracies else None,
        wire_bytes=statistics.mean(o.wire_bytes for o in results),
    )
    record.add(run)
    print(
        f"{task} {trained.hook} ({recipe}) seed {seed}: validation loss {run.loss:.4f} after "
        f"{time.perf_counter() - start:.0f} s",
        flush=True,
    )
    return True
