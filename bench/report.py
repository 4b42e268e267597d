"""Makes a table of a benchmark run's JSON: ``python -m bench.report RUN.json > table.md``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


def number(value: Any) -> str:
    """Short, with the precision that a reader can use."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items())
    return str(value)


def table(run: dict[str, Any]) -> str:
    """Markdown: where the run took place, then one section per group."""
    cpu = run["machine_info"]["cpu"]
    where = (
        f"{cpu.get('brand_raw', 'unknown CPU')}, {cpu['count']} cores, Python "
        f"{run['machine_info']['python_version']}, torch {torch.__version__}, commit "
        f"{run['commit_info'].get('id', 'unknown')[:12]}. Columns: see ../README.md."
    )
    lines = [f"# Benchmarks of {run['datetime'][:10]}", "", where]
    return "\n".join(lines + tables_of_groups(run["benchmarks"]))


def tables_of_groups(benchmarks: list[dict[str, Any]]) -> list[str]:
    """Lines: one section per group, whose columns are what its rows tell."""
    lines: list[str] = []
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in benchmarks:
        groups.setdefault(row["group"], []).append(row)
    for group, rows in groups.items():
        columns = list(dict.fromkeys(key for row in rows for key in row["extra_info"]))
        aims = {str(row["extra_info"].get("aim", "")) for row in rows} - {""}
        columns = [column for column in columns if column != "aim"]
        lines += ["", f"## {group}", ""]
        lines += [f"Aim: {'; '.join(sorted(aims))}.", ""] if aims else []
        lines.append("| case | " + " | ".join(columns) + " |")
        lines.append("|---" * (len(columns) + 1) + "|")
        for row in rows:
            case = row["name"].partition("[")[2].rstrip("]") or row["name"]
            cells = [number(row["extra_info"].get(column, "")) for column in columns]
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the table of the run named on the command line."""
    print(table(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
