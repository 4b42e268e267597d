"""What ``auto`` is worth: ``python -m bench.auto RESULT.json [POINT ...]``, as root.

Measures the points that the file lacks, by default all of them. Each point is written when it ends,
so the command may be interrupted at any time. ``--rate-change MODEL`` changes the link of a running
training from 10 to 1 Gbit/s and back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.auto.measure import errors_of, measure, measure_change
from bench.auto.points import POINTS, QUICK, Effort, Point
from bench.auto.tables import summary_of
from commhooks.lab.machine import describe_machine
from commhooks.planning import Plan


class Record:
    """A JSON file: ``about``, ``errors`` by model and ranks, ``points`` and ``rate_changes``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.document: dict[str, Any] = (
            json.loads(path.read_text())
            if path.exists()
            else {"about": describe_machine(), "errors": {}, "points": {}, "rate_changes": {}}
        )

    def __getitem__(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = self.document[part]
        return found

    def add(self, part: str, name: str, entry: Any) -> None:
        """Add an entry and write the file, all of it or nothing."""
        self.document[part][name] = entry
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.document, indent=1) + "\n")
        new.replace(self._path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file lacks."""
    options = _parser().parse_args(arguments)
    record = Record(options.result)
    points = [Point("tiny", 0)] if options.quick else _chosen(options.point, options.rate_change)
    effort = QUICK if options.quick else _effort(options)
    plans = {name: Plan.load(path) for name, _, path in (p.partition("=") for p in options.plan)}
    for point in points:
        group = f"{point.model}-{point.ranks}"
        known = record["errors"].get(group, {})
        if missing := [spec for spec in effort.settings if spec not in known]:
            found = errors_of(point.model, point.ranks, missing, effort)
            record.add("errors", group, known | found)
        if options.again or point.name not in record["points"]:
            record.add("points", point.name, measure(point, record["errors"][group], effort, plans))
            print(summary_of(record["points"][point.name]), flush=True)
    for model in options.rate_change:
        record.add("rate_changes", model, measure_change(model, effort))


def _effort(options: argparse.Namespace) -> Effort:
    given = {name: getattr(options, name) for name in ("warm_up", "blocks", "block_steps")}
    return replace(Effort(), settings=tuple(options.setting or Effort.settings), **given)


def _chosen(names: Sequence[str], rate_change: Sequence[str]) -> list[Point]:
    by_name = {point.name: point for point in POINTS}
    if unknown := [name for name in names if name not in by_name]:
        raise SystemExit(f"no point is named {unknown[0]!r}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names] if names or rate_change else list(POINTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("point", nargs="*", metavar="POINT", help="such as gpt-100mbit-2")
    parser.add_argument("--rate-change", action="append", default=[], metavar="MODEL")
    parser.add_argument(
        "--plan", action="append", default=[], metavar="NAME=PLAN.json", help="compare with it too"
    )
    parser.add_argument(
        "--setting", action="append", metavar="HOOK", help="compare with these uniform hooks only"
    )
    parser.add_argument("--warm-up", type=int, default=Effort.warm_up, help="steps of auto before")
    parser.add_argument("--blocks", type=int, default=Effort.blocks, help="of each setting")
    parser.add_argument("--block-steps", type=int, default=Effort.block_steps)
    parser.add_argument("--again", action="store_true", help="measure also what is in the file")
    parser.add_argument("--quick", action="store_true", help="a tiny model over loopback")
    return parser


if __name__ == "__main__":
    main()
