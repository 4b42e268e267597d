"""What ``commhooks compare --json`` writes."""

from __future__ import annotations

import re

from bench.results_page.kind import Document, Kind, Section, number, table
from bench.results_page.plots import bars

__all__ = ["COMPARISONS"]

_COLUMNS = [
    "step_seconds",
    "to_torch",
    "exposed_seconds",
    "floor_seconds",
    "wire_bytes",
    "ratio",
    "error",
    "peak_bytes",
    "validation_loss",
]


def _render(stem: str, document: Document) -> Section:
    section = Section([f"{document['model']}, {document['world_size']} ranks.", ""])
    section.lines += [*(f"- {note}" for note in document.get("notes", ())), ""]
    rows = document["rows"]
    for link in dict.fromkeys(row["link"] for row in rows):
        chosen = [row for row in rows if row["link"] == link]
        how = "measured" if all(row["measured"] for row in chosen) else "predicted"
        section.lines += [f"### {link}, {how}", ""]
        section.add_plot(
            f"{stem}-{re.sub(r'[^a-z0-9]+', '-', link.lower())}.svg",
            f"{link}: time of a step over torch's",
            bars(link, {row["hook"]: row["to_torch"] for row in chosen}, "step over torch's"),
        )
        columns = [name for name in _COLUMNS if any(row.get(name) is not None for row in chosen)]
        cells = [
            [row["hook"], *(number(name, row.get(name)) for name in columns)] for row in chosen
        ]
        section.lines += table(["hook", *columns], cells)
    return section


COMPARISONS = Kind(
    "commhooks compare",
    lambda document: {"rows", "model", "world_size"} <= document.keys(),
    _render,
)
