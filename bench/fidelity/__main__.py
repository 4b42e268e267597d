"""Measure what training loses with each hook: ``python -m bench.fidelity RESULTS.json``

Train with every hook at its default options, and with plain averaging, on the same data for equal
numbers of steps, and add each run to RESULTS.json. Runs that the file already has, with the same
options, are not repeated, so the command may be interrupted at any time. With ``--publish``, also
write the figures that the package and the docs show. ``make results`` shows the file.

``--hook`` chooses hooks and variants by their names, or tries options of a hook, as in
``--hook topk:warmup_steps=0 --first-seed 3 --task bytes``, and prints a table in Markdown.
``--recipe`` names one of the task's optimizers for them; plain averaging keeps the usual one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.fidelity.runs import PACKAGED, Record, figures, row_of
from bench.fidelity.tasks import ALL_TASKS, TASKS
from bench.fidelity.trained_hooks import TrainedHook, trained_hooks, trained_on
from bench.fidelity.training import run_missing
from bench.tables import table
from commhooks.hook.spec import hook_spec
from commhooks.testing import close_ranks


def main() -> None:
    """Run what is missing, and save each run as it ends."""
    arguments = _parser().parse_args()
    record, tasks = Record.load(arguments.results), arguments.task or list(TASKS)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for task in tasks:
            chosen = list(_chosen(arguments, task))
            run_missing(task, chosen, seed, record, arguments.results, again=arguments.again)
    close_ranks()
    if arguments.hook:
        found = (
            (task, row_of(record, task, t)) for task in tasks for t in _chosen(arguments, task)
        )
        print(table({"task": task} | row.cells for task, row in found if row is not None))
    if arguments.publish:
        PACKAGED.write_text(json.dumps(figures(record), indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    usual = f"default: {', '.join(TASKS)}"
    parser.add_argument("--task", choices=ALL_TASKS, action="append", help=usual)
    parser.add_argument("--hook", action="append", help="may be repeated; default: all")
    parser.add_argument("--recipe", help="default: the usual one of the hook and the task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)  # published figures have 0 to 2
    parser.add_argument("--again", action="store_true", help="repeat runs that the file has")
    parser.add_argument("--publish", action="store_true", help="also write hook/fidelity.json")
    return parser


def _chosen(arguments: argparse.Namespace, task: str) -> Iterator[TrainedHook]:
    """Yield the named hooks and variants that are trained on a task, and hooks with options."""
    usual = {trained.hook: trained for trained in trained_hooks()}
    found = {trained.title: trained for trained in trained_on(task)}
    variants = {trained.title for trained in trained_on("gpt")}
    for name in arguments.hook or found:
        if name not in variants:
            hook, options = (config := dict(hook_spec(name).config)).pop("name"), config
            default = usual.get(hook, TrainedHook(hook))
            found[name] = replace(default, options={**default.options, **options})
        if name in found:
            yield replace(found[name], recipe=arguments.recipe or found[name].recipe)


if __name__ == "__main__":
    main()
