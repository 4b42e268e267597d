"""What ``auto`` is worth: ``python -m bench.auto RESULT.json [POINT ...]``, as root.

Measures the points that the file lacks, by default all of them. Each point is written when it ends,
so the command may be interrupted at any time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.auto.measure import POINTS, QUICK, Effort, Point, errors_of, measure
from bench.auto.tables import summary_of
from commhooks.lab.machine import describe_machine
from commhooks.planning import Plan


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file lacks."""
    parser, by_name = _parser(), {point.name: point for point in POINTS}
    options = parser.parse_args(arguments)
    if unknown := set(options.point) - by_name.keys():
        parser.error(f"no point is named {min(unknown)!r}; there are {', '.join(by_name)}")
    path: Path = options.result
    about: Any = {"about": describe_machine(), "errors": {}, "points": {}}
    record = json.loads(path.read_text()) if path.exists() else about
    points, effort = [Point("tiny", 0)], QUICK
    if not options.quick:
        points = [by_name[name] for name in options.point or by_name]
        given = {name: getattr(options, name) for name in ("warm_up", "blocks", "block_steps")}
        effort = replace(Effort(), settings=tuple(options.setting or Effort.settings), **given)
    plans = {name: Plan.load(file) for name, _, file in (p.partition("=") for p in options.plan)}
    for point in points:
        errors = record["errors"].setdefault(f"{point.model}-{point.ranks}", {})
        if missing := [spec for spec in effort.settings if spec not in errors]:
            errors |= errors_of(point.model, point.ranks, missing, effort)
        if options.again or point.name not in record["points"]:
            record["points"][point.name] = measure(point, errors, effort, plans)
            print(summary_of(record["points"][point.name]), flush=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("result", type=Path, metavar="RESULT.json")
    add("point", nargs="*", metavar="POINT", help="such as gpt-100mbit-2")
    add("--plan", action="append", default=[], metavar="NAME=PLAN.json", help="compare with it too")
    add("--setting", action="append", metavar="HOOK", help="compare with these uniform hooks only")
    add("--warm-up", type=int, default=Effort.warm_up, help="steps of auto before")
    add("--blocks", type=int, default=Effort.blocks, help="of each setting")
    add("--block-steps", type=int, default=Effort.block_steps)
    add("--again", action="store_true", help="measure also what is in the file")
    add("--quick", action="store_true", help="a tiny model over loopback")
    return parser


if __name__ == "__main__":
    main()
