"""Measure what training loses with each hook: ``python -m bench.fidelity RESULTS.json``

Train with every hook at its default options, and with plain averaging, on the same data for equal
numbers of steps, and add each run to RESULTS.json. Runs that the file already has, with the same
options, are not repeated, so the command may be interrupted at any time. With ``--publish``, also
write the figures that the package and the docs show. ``make results`` shows the file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from bench.fidelity.published import publish
from bench.fidelity.record import Record, Run
from bench.fidelity.tasks import TASKS
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook, trained_hooks
from bench.fidelity.training import RANKS, train
from commhooks.testing import close_ranks, run_ranks

_TIMEOUT = 3600.0  # seconds; a run takes 15 on an idle machine


def main() -> None:
    """Run what is missing, and save each run as it ends."""
    arguments = _parser().parse_args()
    record = Record.load(arguments.results)
    chosen = [s for s in trained_hooks() if not arguments.hook or s.hook in arguments.hook]
    for seed in range(arguments.seeds):
        for task in arguments.task or TASKS:
            for trained in _with_references(task, chosen):
                if _run(task, trained, seed, record, again=arguments.again):
                    record.save(arguments.results)
    close_ranks()
    if arguments.publish:
        publish(record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--hook", action="append", help="may be repeated; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="repeat runs that the file has")
    parser.add_argument(
        "--publish", action="store_true", help="also write commhooks/hook/fidelity.json"
    )
    return parser


def _with_references(task: str, chosen: list[TrainedHook]) -> list[TrainedHook]:
    """Return the hooks, after the plain averaging that each is compared with."""
    usual = TASKS[task].usual
    recipes = dict.fromkeys(trained.reference_recipe or usual for trained in chosen)
    return [*(TrainedHook(REFERENCE, recipe=recipe) for recipe in recipes), *chosen]


def _run(task: str, trained: TrainedHook, seed: int, record: Record, *, again: bool) -> bool:
    """Train once and add the run to the record. Return whether it was missing."""
    config, recipe = trained.create().to_config(), trained.recipe or TASKS[task].usual
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


if __name__ == "__main__":
    main()
