"""Measure what training loses with each hook: ``python -m bench.fidelity RESULTS.json``

Train with every hook at its default options, and with plain averaging, on the same data for equal
numbers of steps, and add each run to RESULTS.json. Runs that the file already has, with the same
options, are not repeated, so the command may be interrupted at any time. With ``--publish``, also
write the figures that the package and the docs show. ``make results`` shows the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.fidelity.missing import run_missing
from bench.fidelity.published import publish
from bench.fidelity.record import Record
from bench.fidelity.tasks import TASKS
from bench.fidelity.variants import trained_on
from commhooks.testing import close_ranks


def main() -> None:
    """Run what is missing, and save each run as it ends."""
    arguments = _parser().parse_args()
    record = Record.load(arguments.results)
    for seed in range(arguments.seeds):
        for task in arguments.task or TASKS:
            hooks, names = trained_on(task), arguments.hook
            chosen = [trained for trained in hooks if not names or trained.title in names]
            run_missing(task, chosen, seed, record, arguments.results, again=arguments.again)
    close_ranks()
    if arguments.publish:
        publish(record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--hook", action="append", help="or variant; may be repeated; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="repeat runs that the file has")
    parser.add_argument(
        "--publish", action="store_true", help="also write commhooks/hook/fidelity.json"
    )
    return parser


if __name__ == "__main__":
    main()
