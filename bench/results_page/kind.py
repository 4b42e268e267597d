"""What the page needs to know of a kind of result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Kind", "Section", "number", "table"]

Document = dict[str, Any]
Draw = Callable[[Path], None]
"""Writes a plot to a file."""


@dataclass
class Section:
    """The part of the page that a file of results gets. ``plots``: by file name."""

    lines: list[str]
    plots: dict[str, Draw] = field(default_factory=dict)

    def add_plot(self, name: str, alternative: str, draw: Draw) -> None:
        """Puts a plot here, which ``draw`` makes when the page is written."""
        self.plots[name] = draw
        self.lines += [f"![{alternative}](results/{name})", ""]

    @property
    def tables(self) -> str:
        """Without the plots."""
        return "\n".join(line for line in self.lines if not line.startswith("!["))


@dataclass(frozen=True)
class Kind:
    """``recognizes``: by what is in the JSON. ``render``: its file's stem, and what is in it."""

    name: str
    recognizes: Callable[[Document], bool]
    render: Callable[[str, Document], Section]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """In Markdown."""
    header = list(header)
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


_UNITS = [
    ("milliseconds", 1.0, "ms"),
    ("seconds", 1e3, "ms"),
    ("bytes", 1e-6, "MB"),
    ("bandwidth", 1e-9, "GB/s"),
]


def number(column: str, value: Any) -> str:
    """Short, in the unit that the name of the column asks for."""
    if value is None or value == "":
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {number(column, item)}" for key, item in value.items())
    if isinstance(value, bool | str):
        return str(value).replace("|", "\\|")
    for name, scale, unit in _UNITS:
        if name in column:
            return (
                f"{value * scale:.3g} {unit}" if value * scale < 1000 else _long(value, scale, unit)
            )
    return f"{value:.4g}"


def _long(value: float, scale: float, unit: str) -> str:
    return f"{value * scale:,.0f} {unit}"
