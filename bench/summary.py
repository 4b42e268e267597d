"""The page of results that takes three minutes to read, docs/results.md, and its plots.

Every figure is computed from the files in bench/results. The newest file of each kind counts.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from bench import figures
from bench.fidelity.published import by_hook
from bench.fidelity.record import Record
from bench.fidelity.rows import Row, mean, measured_tasks, plain_runs, rows, spread
from bench.fidelity.tasks import TASKS
from bench.plots import Draw
from bench.slow_link.hooks import PLAIN
from bench.slow_link.record import courses_of
from commhooks.lab.units import format_rate

__all__ = ["page", "plots"]

_TEMPLATE = Path(__file__).with_name("results_template.md")
_SLOW_LINK = "*-100mbit*.json"
_LIMIT = 0.02
"""The change of the loss that counts as a loss."""


def plots(results: Path) -> dict[str, Draw]:
    """Return the plots, by file name."""
    return {
        "fidelity.svg": figures.fidelity(_by_task(results)),
        "slow-link.svg": figures.slow_link(courses_of(_newest(results, _SLOW_LINK))),
        "scaling.svg": figures.scaling(_newest(results, "*-links.json")["cells"]),
        "kernels.svg": figures.kernels(_newest(results, "*-kernels.json")["benchmarks"]),
    }


def _newest(results: Path, pattern: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(max(results.glob(pattern)).read_text())
    return document


def _by_task(results: Path) -> dict[str, list[Row]]:
    record = Record.load(max(results.glob("*-fidelity.json")))
    return {task: rows(record, task) for task in measured_tasks(record)}


def page(results: Path) -> str:
    """Return the page in Markdown."""
    return _TEMPLATE.read_text().format(
        **_fidelity(results),
        **_slow_link(results),
        **_links(results),
        **_kernels(results),
        **_averaging(results),
        **_one_gigabit(results),
    )


def _fidelity(results: Path) -> dict[str, Any]:
    record = Record.load(max(results.glob("*-fidelity.json")))
    measured = {hook: list(found.values()) for hook, found in by_hook(record).items()}
    worst = {hook: max(row.change for row in found) for hook, found in measured.items()}
    shares = {hook: max(row.byte_share for row in found) for hook, found in measured.items()}
    within = [name for name, change in worst.items() if change <= _LIMIT]
    least = min(within, key=shares.__getitem__)
    tasks = measured_tasks(record)
    plain = [next(iter(plain_runs(record, task).values())) for task in tasks]
    spreads = [spread(runs) for runs in plain if len(runs) > 1]
    beyond = sorted((name for name in worst if name not in within), key=worst.__getitem__)
    return {
        "hooks": len(worst),
        "within": len(within),
        "least": least,
        "least_share": f"{shares[least]:.0%}".replace("%", " %"),
        "beyond": ", ".join(f"`{name}`" for name in beyond),
        "spread": f"{100 * mean(spreads):.0f} %",
        "tasks": ", ".join(tasks),
        "seeds": _range({len(row.runs) for found in measured.values() for row in found}),
        "front": _front(rows(record, "gpt")),
        "fidelity_ranks": record.about["ranks"],
    }


_FRONT = """
The largest, `gpt`, has a million parameters and 1,000 steps, and is also trained with the recipes
of [DiLoCo](hooks/diloco.md#recipes). Its Pareto front: no other training beats these in both.
Losses are relative to plain averaging with AdamW, whatever the optimizer, so compare hooks that
have the same one.

| hook | optimizer | bytes | loss against plain averaging | by seed |
|---|---|---|---|---|
"""


def _front(found: list[Row]) -> str:
    """Return a table of the hooks that no other beats in both loss and bytes."""
    if not found:
        return ""
    points = {(row.byte_share, row.change_to_usual): row for row in found}
    lines = []
    for share, change in figures.pareto_front(list(points)):
        row = points[share, change]
        seeds = ", ".join(f"{each:+.1%}" for each in row.changes_to_usual)
        times = f"{1 / share:,.0f}" if share < 0.01 else f"{1 / share:.1f}"
        optimizer = row.trained.recipe or TASKS["gpt"].usual
        lines.append(f"| {row.trained.label} | {optimizer} | 1/{times} | {change:+.1%} | {seeds} |")
    return _FRONT + "\n".join(lines).replace("%", " %") + "\n"


def _slow_link(results: Path) -> dict[str, Any]:
    document = _newest(results, _SLOW_LINK)
    courses, about = courses_of(document), document["about"]
    plain = courses[PLAIN].lowest
    arrivals = {
        hook: arrival.seconds
        for hook, course in courses.items()
        if hook != PLAIN and (arrival := course.first_at(plain.validation_loss))
    }
    best = min(arrivals.keys() - {"noop"}, key=arrivals.__getitem__)
    of_noop = f"{arrivals['noop']:.0f} s" if "noop" in arrivals else "never"
    return {
        "slow_ranks": about["ranks"],
        "plain_steps": plain.step,
        "parameters": f"{about['parameters'] / 1e6:.1f}",
        "rate": format_rate(about["bits_per_second"]),
        "plain_seconds": f"{plain.seconds:.0f}",
        "best": best,
        "best_seconds": f"{arrivals[best]:.0f}",
        "factor": f"{plain.seconds / arrivals[best]:.1f}",
        "noop_arrival": of_noop,
        "arrived": len(arrivals),
        "arrived_names": ", ".join(f"`{h}`" for h in sorted(arrivals, key=arrivals.__getitem__)),
        "raced": len(courses) - 1,
        "cpu": about["cpu"],
        "cores": about["cores"],
        "torch": about["torch"],
        "python": about["python"],
    }


def _links(results: Path) -> dict[str, Any]:
    cells = _newest(results, "*-links.json")["cells"]
    errors = [abs(c["predicted_seconds"] / c["measured_seconds"] - 1) for c in cells]
    return {
        "cells": len(cells),
        "median_error": f"{100 * statistics.median(errors):.0f} %",
        "worst_error": f"{100 * max(errors):.0f} %",
    }


def _kernels(results: Path) -> dict[str, Any]:
    shares = [
        row["extra_info"]["share_of_copy"]
        for row in _newest(results, "*-kernels.json")["benchmarks"]
        if row["name"].startswith(("test_encode", "test_decode"))
    ]
    return {
        "lowest_share": f"{min(shares):.2f}",
        "median_share": f"{statistics.median(shares):.2f}",
        "highest_share": f"{max(shares):.2f}",
    }


def _averaging(results: Path) -> dict[str, Any]:
    def ratios(model: str) -> list[float]:
        found = _newest(results, "*-hooks-and-averaging.json")["benchmarks"]
        names = f"test_averaging[{model}"
        return [r["extra_info"]["ratio_to_torch"] for r in found if r["name"].startswith(names)]

    def span(values: list[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}"

    return {"large": span(ratios("transformer-151MB")), "small": span(ratios("2000x256"))}


def _one_gigabit(results: Path) -> dict[str, Any]:
    document = _newest(results, "*-compare-1gbit.json")
    found: dict[str, dict[str, float]] = {}
    for row in document["rows"]:
        found.setdefault(row["hook"], {})[row["link"]] = row["to_torch"]
    lines = [
        f"| `{hook}` | {by_link['loopback']:.2f} | {by_link['1 Gbit/s']:.2f} |"
        for hook, by_link in found.items()
        if hook not in ("bare", "torch")
    ]
    others = {"bare", "torch", PLAIN}
    loopback = [by_link["loopback"] for hook, by_link in found.items() if hook not in others]
    return {
        "one_gigabit": "\n".join(lines),
        "slower": sum(ratio > 1 for ratio in loopback),
        "compressing": len(loopback),
    }


def _range(numbers: set[int]) -> str:
    return str(*numbers) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"
