"""What ``auto`` is worth: ``python -m bench.auto RESULT.json [POINT ...]``, as root.

Measures the points that the file lacks, by default all of them. Each point is written when it ends,
so the command may be interrupted at any time. ``--rate-change MODEL`` changes the link of a running
training from 10 to 1 Gbit/s and back.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.auto.measure import errors_of, measure
from bench.auto.points import POINTS, QUICK, Effort, Point
from bench.auto.rate_change import measure_change
from bench.auto.record import Record
from bench.auto.tables import summary_of


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file lacks."""
    options = _parser().parse_args(arguments)
    record = Record(options.result)
    points = [Point("tiny", 0)] if options.quick else _chosen(options.point, options.rate_change)
    effort = QUICK if options.quick else _effort(options)
    for point in points:
        group = f"{point.model}-{point.ranks}"
        if group not in record["errors"]:
            record.add("errors", group, errors_of(point.model, point.ranks, effort))
        if options.again or point.name not in record["points"]:
            record.add("points", point.name, measure(point, record["errors"][group], effort))
            print(summary_of(record["points"][point.name]), flush=True)
    for model in options.rate_change:
        record.add("rate_changes", model, measure_change(model, effort))


def _effort(options: argparse.Namespace) -> Effort:
    return replace(Effort(), blocks=options.blocks, block_steps=options.block_steps)


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
    parser.add_argument("--blocks", type=int, default=Effort.blocks, help="of each setting")
    parser.add_argument("--block-steps", type=int, default=Effort.block_steps)
    parser.add_argument("--again", action="store_true", help="measure also what is in the file")
    parser.add_argument("--quick", action="store_true", help="a tiny model over loopback")
    return parser


if __name__ == "__main__":
    main()
