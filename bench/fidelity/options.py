"""Try other options of a hook: ``python -m bench.fidelity.options RESULTS.json --hook topk ...``

Train with each set of options that ``--try`` gives as JSON, ``--try '{"warmup_steps": 0}'``, and
with plain averaging, and add the runs to RESULTS.json as ``python -m bench.fidelity`` does. Then
print the hook's runs as a table in Markdown, next to those with its present defaults. ``--recipe``
names one of the task's optimizers for the hook; plain averaging keeps the usual one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.fidelity.missing import run_missing
from bench.fidelity.record import Record
from bench.fidelity.rows import Row, row_of
from bench.fidelity.tasks import ALL_TASKS, TASKS
from bench.fidelity.trained_hooks import TrainedHook, trained_hooks
from commhooks.testing import close_ranks

_TASKS = [*TASKS, "clusters"]  # those with the optimizers of all hooks
_FIRST_SEED = 3  # the published figures, which are not used to choose options, have 0 to 2
_HEADER = """\
| hook | options | task | validation loss to plain | by seed | bytes to plain |
|---|---|---|---|---|---|"""


def main() -> None:
    """Run what is missing, save each run as it ends, and print the table."""
    arguments = _parser().parse_args()
    default = _default(arguments.hook)
    if arguments.recipe:
        default = dataclasses.replace(default, recipe=arguments.recipe)
    tried = [default, *(_with_options(default, options) for options in arguments.tried)]
    record = Record.load(arguments.results)
    tasks = arguments.task or _TASKS
    for seed in range(_FIRST_SEED, _FIRST_SEED + arguments.seeds):
        for task in tasks:
            run_missing(task, tried, seed, record, arguments.results)
    close_ranks()
    print("\n".join([_HEADER, *_table(record, tasks, tried)]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--hook", required=True)
    parser.add_argument("--try", dest="tried", type=json.loads, action="append", default=[])
    parser.add_argument(
        "--task", choices=ALL_TASKS, action="append", help="default: " + ", ".join(_TASKS)
    )
    parser.add_argument("--recipe", help="default: the usual one of the hook and the task")
    parser.add_argument("--seeds", type=int, default=3)
    return parser


def _default(hook: str) -> TrainedHook:
    found = (trained for trained in trained_hooks() if trained.hook == hook)
    return next(found, TrainedHook(hook))


def _with_options(trained: TrainedHook, options: Mapping[str, Any]) -> TrainedHook:
    return dataclasses.replace(trained, options={**trained.options, **options})


def _table(record: Record, tasks: list[str], tried: list[TrainedHook]) -> Iterator[str]:
    for trained in tried:
        options = ", ".join(f"{name}={value}" for name, value in trained.options.items())
        options = "; ".join(filter(None, [options or "defaults", trained.recipe]))
        for task in tasks:
            row = row_of(record, task, trained)
            if row is not None:
                yield _line(row, options, task)


def _line(row: Row, options: str, task: str) -> str:
    by_seed = ", ".join(f"{change:+.1%}" for change in row.changes)
    name = row.trained.label
    return f"| {name} | {options} | {task} | {row.change:+.1%} | {by_seed} | {row.byte_share:.3f} |"


if __name__ == "__main__":
    main()
