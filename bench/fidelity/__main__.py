"""Measure what training loses with each hook: ``python -m bench.fidelity RESULTS.json``

Train with every hook at its default options, and with plain averaging, on the same data for equal
numbers of steps, and add each run to RESULTS.json. Runs that the file already has, with the same
options, are not repeated, so the command may be interrupted at any time. With ``--publish``, also
write the figures that the package and the docs show. ``make results`` shows the file.

``--hook`` chooses hooks and variants by their names, or tries options of a hook, as in
``--hook topk:warmup_steps=0 --first-seed 3 --task bytes``, and prints a table in Markdown.
``--recipe`` names one of the task's optimizers for them; plain averaging keeps the usual one.
``--link``, as root, trains them over a link of that rate, without anything to compare with.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.fidelity.runs import PACKAGED, Record
from bench.fidelity.tasks import ALL_TASKS, TASKS
from bench.fidelity.trained_hooks import RANKS, TrainedHook, trained_hooks, trained_on
from bench.fidelity.training import run_missing, run_over_link
from bench.files import Results
from bench.tables import table
from commhooks.costs.units import parse_rate
from commhooks.testing import close_ranks


def main() -> None:
    """Run what is missing, and save each run as it ends."""
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
    parser.add_argument("--link", type=parse_rate, help="of each rank, for example 100mbit")
    parser.add_argument("--publish", action="store_true", help="also write hook/fidelity.json")
    arguments = parser.parse_args()
    results = Results(arguments.results, ranks=RANKS)
    chosen = {task: list(_chosen(arguments, task)) for task in arguments.task or TASKS}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for task, hooks in chosen.items():
            if arguments.link is None:
                run_missing(task, hooks, seed, results)
            else:
                run_over_link(task, hooks, seed, results, arguments.link)
    close_ranks()
    record = Record(results.document)
    if arguments.hook and arguments.link is None:
        found = ((task, record.row(task, t)) for task, hooks in chosen.items() for t in hooks)
        print(table({"task": task} | row.cells for task, row in found if row is not None))
    if arguments.publish:
        PACKAGED.write_text(json.dumps(record.figures(), indent=1) + "\n")


def _chosen(arguments: argparse.Namespace, task: str) -> Iterator[TrainedHook]:
    """Yield the named hooks and variants that are trained on a task, and hooks with options."""
    usual = {trained.hook: trained for trained in trained_hooks()}
    found = {trained.title: trained for trained in trained_on(task)}
    variants = {trained.title for trained in trained_on("gpt")}
    for name in arguments.hook or found:
        if name not in variants:
            tried = TrainedHook(name)
            found[name] = replace(usual.get(tried.hook, tried), spec=name)
        if name in found:
            yield replace(found[name], recipe=arguments.recipe or found[name].recipe)


if __name__ == "__main__":
    main()
