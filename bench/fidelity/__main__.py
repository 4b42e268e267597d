"""Measure what training loses with each hook: ``python -m bench.fidelity RESULTS.json``

Train with every hook at its default options, and with plain averaging, on the same data for equal
numbers of steps, and add each run to RESULTS.json. Runs that the file already has, with the same
options, are not repeated, so the command may be interrupted at any time. With ``--publish``, also
write the figures that the package and the docs show. ``make results`` shows the file.

``--hook topk --try '{"warmup_steps": 0}'`` trains one hook with other options, which may be
repeated, on other seeds and also on the task ``clusters``, and prints a table in Markdown.
``--recipe`` names one of the task's optimizers for it; plain averaging keeps the usual one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.fidelity.runs import PACKAGED, Record, figures, row_of
from bench.fidelity.tasks import ALL_TASKS, TASKS
from bench.fidelity.trained_hooks import TrainedHook, trained_hooks, trained_on
from bench.fidelity.training import run_missing
from commhooks.testing import close_ranks

_HEADER = """\
| hook | options | task | validation loss to plain | by seed | bytes to plain |
|---|---|---|---|---|---|"""


def main() -> None:
    """Run what is missing, and save each run as it ends."""
    arguments = _parser().parse_args()
    record, tried = Record.load(arguments.results), _tried(arguments)
    # The published figures, which are not used to choose options, have the seeds 0 to 2.
    first = 3 if tried else 0
    tasks = arguments.task or [*TASKS, *(["clusters"] if tried else [])]
    for seed in range(first, first + arguments.seeds):
        for task in tasks:
            named = arguments.hook
            chosen = tried or [t for t in trained_on(task) if not named or t.title in named]
            run_missing(task, chosen, seed, record, arguments.results, again=arguments.again)
    close_ranks()
    if tried:
        print("\n".join([_HEADER, *_table(record, tasks, tried)]))
    if arguments.publish:
        PACKAGED.write_text(json.dumps(figures(record), indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    usual = f"default: {', '.join(TASKS)}"
    parser.add_argument("--task", choices=ALL_TASKS, action="append", help=usual)
    parser.add_argument("--hook", action="append", help="or variant; may be repeated; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="repeat runs that the file has")
    parser.add_argument("--publish", action="store_true", help="also write hook/fidelity.json")
    parser.add_argument("--try", dest="tried", type=json.loads, action="append", default=[])
    parser.add_argument("--recipe", help="default: the usual one of the hook and the task")
    return parser


def _tried(arguments: argparse.Namespace) -> list[TrainedHook]:
    """Return the hook with its default options and with those that are tried, if any are."""
    if not arguments.tried and not arguments.recipe:
        return []
    (name,) = arguments.hook
    default = next((t for t in trained_hooks() if t.hook == name), TrainedHook(name))
    default = dataclasses.replace(default, recipe=arguments.recipe or default.recipe)
    return [
        dataclasses.replace(default, options={**default.options, **options})
        for options in ({}, *arguments.tried)
    ]


def _table(record: Record, tasks: Sequence[str], tried: list[TrainedHook]) -> Iterator[str]:
    for trained in tried:
        options = ", ".join(f"{name}={value}" for name, value in trained.options.items())
        options = "; ".join(filter(None, [options or "defaults", trained.recipe]))
        for row, task in ((row_of(record, task, trained), task) for task in tasks):
            if row is not None:
                by_seed = ", ".join(f"{change:+.1%}" for change in row.changes)
                cells = [trained.label, options, task, f"{row.change:+.1%}", by_seed]
                yield f"| {' | '.join(cells)} | {row.byte_share:.3f} |"


if __name__ == "__main__":
    main()
