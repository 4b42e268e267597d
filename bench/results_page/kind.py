"""What the page needs to know of a kind of result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Kind", "Section", "bars", "number", "table"]

Document = dict[str, Any]
Draw = Callable[[Path], None]


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
    """``recognises``: by what is in the JSON. ``render``: its file's stem, and what is in it."""

    name: str
    recognises: Callable[[Document], bool]
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


def bars(title: str, values: dict[str, float], label: str, *, log: bool = False) -> Draw:
    """Draws one horizontal bar for each value, with a line at 1."""

    def draw(path: Path) -> None:
        import matplotlib as mpl

        mpl.use("svg")
        mpl.rcParams["svg.hashsalt"] = "commhooks"  # the same file each time
        mpl.rcParams["svg.fonttype"] = "none"  # text as text, which is short
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.22 * len(values)))
        axes.barh(list(values), list(values.values()), color="#4c78a8")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        if log:
            axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=8)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)

    return draw
