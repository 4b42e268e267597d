"""Runs of ``make bench``: pytest-benchmark's JSON."""

from __future__ import annotations

import re
from typing import Any

from bench.results_page.kind import Document, Kind, Section, number, table
from bench.results_page.plots import bars

__all__ = ["BENCHMARKS", "add_groups"]

# What is drawn of a group: the first of these that its rows have.
_DRAWN = {
    "ratio_to_torch": "time over that of torch's plain averaging",
    "share_of_copy": "bandwidth over that of a plain copy",
    "added_to_torch_added": "added time over what torch adds",
    "times_floor": "time over wire bytes / bandwidth + plain backward",
    "peak_to_gradients": "extra peak memory over the bytes of the gradients",
}


Row = dict[str, Any]


def add_groups(section: Section, stem: str, rows: list[Row]) -> None:
    """One table, and perhaps a plot, for each group of benchmarks."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"] or row["fullname"], []).append(row)
    for group, members in groups.items():
        _add_group(section, stem, group, members)


def _case(row: Row) -> str:
    name: str = row["name"].partition("[")[2].removesuffix("]") or row["name"]
    return name


def _render(stem: str, run: Document) -> Section:
    machine, cpu = run["machine_info"], run["machine_info"]["cpu"]
    where = (
        f"{cpu.get('brand_raw', 'unknown CPU')}, {cpu['count']} cores, Python "
        f"{machine['python_version']}, commit {run['commit_info'].get('id', 'unknown')[:12]}."
    )
    section = Section([where, ""])
    add_groups(section, stem, run["benchmarks"])
    return section


def _add_group(section: Section, stem: str, group: str, rows: list[Row]) -> None:
    section.lines += [f"### {group}", ""]
    infos = [row["extra_info"] for row in rows]
    aims = {str(info["aim"]) for info in infos if "aim" in info}
    section.lines += [f"Aim: {'; '.join(sorted(aims))}.", ""] if aims else []
    drawn = next((name for name in _DRAWN if any(name in info for info in infos)), None)
    if drawn:
        values = {
            _case(row): row["extra_info"][drawn] for row in rows if drawn in row["extra_info"]
        }
        plot = f"{stem}-{re.sub(r'[^a-z0-9]+', '-', group.lower())}.svg"
        section.add_plot(plot, f"{group}: {drawn}", bars(group, values, _DRAWN[drawn]))
    columns = list(dict.fromkeys(key for info in infos for key in info if key != "aim"))
    cells = [
        [_case(row), *(number(column, row["extra_info"].get(column)) for column in columns)]
        for row in rows
    ]
    section.lines += table(["case", *columns], cells)


BENCHMARKS = Kind(
    "pytest-benchmark", lambda document: {"benchmarks", "machine_info"} <= document.keys(), _render
)
