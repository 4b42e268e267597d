"""What ``auto`` is worth: ``python -m bench.auto RESULT.json [POINT ...]``, as root.

Measures the points that the file lacks, by default all of them. Each point is written when it ends,
so the command may be interrupted at any time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import files
from bench.auto.measure import POINTS, QUICK, Effort, Point, measure
from bench.auto.tables import summary_of
from commhooks.lab.machine import describe_machine
from commhooks.planning import Plan


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file lacks."""
    by_name = {point.name: point for point in POINTS}
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
    options = parser.parse_args(arguments)
    if unknown := set(options.point) - by_name.keys():
        parser.error(f"no point is named {min(unknown)!r}; there are {', '.join(by_name)}")
    points, effort = [Point("tiny", 0)], QUICK
    if not options.quick:
        points = [by_name[name] for name in options.point or by_name]
        settings = tuple(options.setting or Effort.settings)
        effort = Effort(settings, options.warm_up, options.blocks, options.block_steps)
    plans = {name: Plan.load(file) for name, _, file in (p.partition("=") for p in options.plan)}
    record = files.load(options.result, {"about": describe_machine(), "points": {}})
    for point in points:
        if options.again or point.name not in record["points"]:
            record["points"][point.name] = measure(point, effort, plans)
            files.save(options.result, record)
            print(summary_of(record["points"][point.name]), flush=True)


if __name__ == "__main__":
    main()
