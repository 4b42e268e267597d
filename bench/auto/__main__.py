"""Benefit of ``auto``: ``python -m bench.auto RESULT.json [POINT ...]``, as root.

Measures the points that the file lacks, by default all of them: ``auto`` and what it is compared
with, in turn, in the same processes. Each point is written when it ends, so the command may be
interrupted at any time.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.auto.tables import point_rows, title
from bench.auto.trainings import AUTO, MODELS, POINTS, REFERENCE, Point, Training, Trainings
from bench.files import Results
from bench.models import parameter_shapes
from bench.tables import table
from commhooks.algorithms.adaptive.choices import DEFAULT_CANDIDATES
from commhooks.cluster import Ranks
from commhooks.hook.base import is_lossless
from commhooks.hook.spec import hook_spec

Row = dict[str, Any]
EFFORT = {
    "warm_up": 120,  # steps of `auto` before it is timed; the first plan is in use after about 18
    "blocks": 5,  # of each setting, in turn
    # At least 3, or most steps of `auto` follow a pause, during which it believes to train. The
    # models of the other settings are in the caches at first, so messages seem slower.
    "block_steps": 6,
    "error_steps": 4,
    "error_after": 15,  # steps before the error of a uniform setting is measured
}
"""Amount of measurement."""


def measure(point: Point, uniform: Sequence[str]) -> Row:
    """Measure ``auto`` at a point, and the uniform settings that it is compared with."""
    with point.link() as link, Ranks(point.ranks, link) as ranks:
        ranks.keep(Trainings, point.model)
        settings: dict[str, Row] = {AUTO: {}} | _within_the_limit(ranks, uniform)
        before = _loads()
        ranks.call(Trainings.add, AUTO)
        warm_up = _slowest(ranks, AUTO, EFFORT["warm_up"])
        _take_turns(ranks, settings)
        wall, busy, used = (now - then for now, then in zip(_loads(), before, strict=True))
        plan, history, metrics, planning_seconds = ranks.call(Trainings.do, AUTO, Training.learned)[
            0
        ]
        settings[AUTO]["error"] = _error(ranks, AUTO)
    settings[AUTO]["predicted_seconds"] = plan.after.step_seconds
    elements: Counter[str] = Counter()
    for row in plan.rows:
        elements[row.hook] += row.elements
    trained = sum(warm_up) + sum(map(sum, settings[AUTO]["blocks"]))
    return {
        "point": asdict(point),
        "parameters": sum(shape.numel() for shape in parameter_shapes(MODELS[point.model].factory)),
        "effort": {"settings": uniform, **EFFORT},
        "settings": settings,
        "auto": {
            "warm_up_seconds": warm_up,
            "history": history,
            "metrics": metrics,
            "hooks": {hook: count / plan.elements for hook, count in elements.items()},
            "reason": plan.reason,
            "planning_share": planning_seconds / trained,
        },
        "others": max(0.0, busy - used) / wall,
    }


def _within_the_limit(ranks: Ranks, uniform: Sequence[str]) -> dict[str, Row]:
    """Begin to train with each uniform setting; return those whose errors are within the limit.

    The limit is the error of the reference, which is trained for it in any case.
    """
    errors: dict[str, float] = {}
    for spec in {REFERENCE: None, **dict.fromkeys(uniform)}:
        ranks.call(Trainings.add, spec)
        errors[spec] = 0.0
        if not is_lossless(hook_spec(spec).create()):
            ranks.call(Trainings.do, spec, Training.seconds, EFFORT["error_after"])
            errors[spec] = _error(ranks, spec)
    within = [spec for spec in uniform if errors[spec] <= errors[REFERENCE]]
    for spec in errors.keys() - set(within):
        ranks.call(Trainings.drop, spec)
    return {spec: {"error": errors[spec]} for spec in within}


def _take_turns(ranks: Ranks, settings: dict[str, Row]) -> None:
    """Time all settings, block by block. The first block of each is not counted.

    Each gets ``blocks``: for each turn the seconds of its steps.
    """
    for name, row in settings.items():
        _slowest(ranks, name, EFFORT["block_steps"])
        row["blocks"] = []
    sent = {name: ranks.call(Trainings.do, name, Training.sent)[0] for name in settings}
    names = list(settings)
    for turn in range(EFFORT["blocks"]):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            settings[name]["blocks"].append(_slowest(ranks, name, EFFORT["block_steps"]))
    for name, row in settings.items():
        now = ranks.call(Trainings.do, name, Training.sent)[0]
        steps, nbytes = (after - then for after, then in zip(now, sent[name], strict=True))
        row["wire_bytes"] = nbytes / steps


def _slowest(ranks: Ranks, name: str, steps: int) -> list[float]:
    """Train, and return the seconds of each step on the slowest rank."""
    by_rank = ranks.call(Trainings.do, name, Training.seconds, steps)
    return list(map(max, zip(*by_rank, strict=True)))


def _error(ranks: Ranks, name: str) -> float:
    """Train, and return the median error of a step's average."""
    return statistics.median(
        ranks.call(Trainings.do, name, Training.errors, EFFORT["error_steps"])[0]
    )


def _loads() -> tuple[float, float, float]:
    """Return the time, and the CPU seconds so far of this machine and of these processes."""
    of_machine, own = psutil.cpu_times(), psutil.Process()
    busy = sum(of_machine) - of_machine.idle - of_machine.iowait
    used = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return time.monotonic(), busy, sum(each.user + each.system for each in used)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file lacks."""
    by_name = {point.name: point for point in POINTS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("point", nargs="*", metavar="POINT", help="such as gpt-100mbit-2")
    only = "compare with these uniform hooks only"
    parser.add_argument("--setting", action="append", metavar="HOOK", help=only)
    options = parser.parse_args(arguments)
    if unknown := set(options.point) - by_name.keys():
        parser.error(f"no point is named {min(unknown)!r}; there are {', '.join(by_name)}")
    uniform = options.setting or DEFAULT_CANDIDATES
    results = Results(options.result, runs="points")
    for name in options.point or by_name:
        entry = results.once({"name": name}, partial(measure, by_name[name], uniform))
        print(f"{title(entry)}\n{table(point_rows(entry))}", flush=True)


if __name__ == "__main__":
    main()
