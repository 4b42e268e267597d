"""Plots of results as SVG files. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd

__all__ = ["Draw", "bars", "curves"]

Draw = Callable[[Path], None]
"""Writes a plot to a file."""


def bars(title: str, values: pd.Series, *, log: bool = False) -> Draw:
    """Draw one horizontal bar per value, with a line at 1."""

    def fill(axes: Any) -> None:
        axes.barh([str(label) for label in values.index], values, color="#4c78a8")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        if log:
            axes.set_xscale("log")

    return _plot(title, (8, 1.2 + 0.22 * len(values)), fill)


def curves(title: str, lines: dict[str, Sequence[tuple[float, float]]]) -> Draw:
    """Draw a line through the points of each name, over a logarithmic axis."""

    def fill(axes: Any) -> None:
        from matplotlib import colormaps

        styles = [(color, style) for style in ("-", "--") for color in colormaps["tab20"].colors]
        for (name, points), (color, style) in zip(lines.items(), cycle(styles), strict=False):
            axes.plot(*zip(*points, strict=True), style, color=color, linewidth=1.2, label=name)
        axes.set_xscale("log")
        axes.grid(alpha=0.35)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)

    return _plot(title, (10, max(4.5, 0.18 * len(lines))), fill)


def _plot(title: str, inches: tuple[float, float], fill: Callable[[Any], None]) -> Draw:
    def draw(path: Path) -> None:
        import matplotlib as mpl

        mpl.use("svg")
        mpl.rcParams["svg.hashsalt"] = "commhooks"  # the same file each time
        mpl.rcParams["svg.fonttype"] = "none"  # text stays text, and the file short
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=inches)
        fill(axes)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=8)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)

    return draw
