"""Tables in Markdown, whose numbers get the unit that the name of their column implies."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_UNITS = {
    "milliseconds": (1.0, "ms"),
    "microseconds": (1.0, "µs"),
    "seconds": (1e3, "ms"),
    "bytes": (1e-6, "MB"),
    "bandwidth": (1e-9, "GB/s"),
}


def table(rows: Iterable[Mapping[str, Any]], *, aligned: bool = True) -> str:
    """Return a table with a column for each key. A column without any value is left out.

    ``aligned``: whether columns have the same width in all lines.
    """
    rows = list(rows)
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [quantity(name, row.get(name)) for row in rows]
        if any(cells):
            cells.insert(0, name.replace("_", " "))
            width = max(map(len, cells)) if aligned else 0
            columns.append([cell.ljust(width) for cell in cells])
    head, *lines = (f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
    rule = re.sub("[^|]", "-", head) if aligned else "| --- " * len(columns) + "|"
    return "\n".join([head, rule, *lines])


def quantity(column: str, value: Any) -> str:
    """Format a value of a column, in the unit that the name of the column implies."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {quantity(column, item)}" for key, item in value.items())
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool | str):
        return str(value).replace("|", "\\|")
    for name, (scale, unit) in _UNITS.items():
        if name in column:
            scaled = value * scale
            return f"{scaled:.3g} {unit}" if scaled < 1000 else f"{scaled:,.0f} {unit}"
    return f"{value:.4g}"


def groups(benchmarks: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Render benchmarks of pytest-benchmark: a table for each group."""
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for row in benchmarks:
        by_group.setdefault(row["group"] or row["fullname"], []).append(row)
    for group, members in by_group.items():
        rows = [{"case": case_of(row["name"])} | row["extra_info"] for row in members]
        aims = sorted({str(row.pop("aim")) for row in rows if row.get("aim")})
        yield f"### {group}"
        if aims:
            yield f"Aim: {'; '.join(aims)}."
        yield table(rows)


def case_of(name: str) -> str:
    """Return the parameters in the name of a test, or the name if it has none."""
    return name.partition("[")[2].removesuffix("]") or name
