"""How plots look: one color per hook everywhere, readable on light and on dark pages.

Plots are SVG files with a transparent background and text in a gray that both kinds of pages show
well. matplotlib is imported when the first one is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from commhooks.cli.colors import GRAY

__all__ = ["Draw", "label_points", "plot"]

Draw = Callable[[Path], None]
"""Writes a plot to a file."""

_WIDTH = 6.4
_PLACES = (
    *((5, 0), (-5, 0), (0, 7), (0, -7), (5, 7), (5, -7), (-5, 7), (-5, -7)),
    *((dx, dy) for dy in (15, -15, 24, -24, 33) for dx in (5, -5)),
)


def plot(height: float, columns: int, rows: int, fill: Callable[[Any], None]) -> Draw:
    """Return what draws a figure: ``fill`` gets its axes, in reading order."""

    def draw(path: Path) -> None:
        import matplotlib as mpl

        mpl.use("svg")
        from matplotlib import pyplot

        style = {
            "svg.hashsalt": "commhooks",  # the same file each time
            "svg.fonttype": "none",  # text stays text, and the file short
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.alpha": 0.3,
            "legend.frameon": False,
        }
        names = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "grid.color")
        style |= dict.fromkeys((*names, "xtick.color", "ytick.color"), GRAY)
        with mpl.rc_context(style):
            figure, axes = pyplot.subplots(rows, columns, figsize=(_WIDTH, height), squeeze=False)
            fill(list(axes.flat))
            figure.tight_layout()
            figure.savefig(path, metadata={"Date": None}, transparent=True, bbox_inches="tight")
            pyplot.close(figure)

    return draw


def label_points(
    axes: Any,
    points: Sequence[tuple[str, float, float]],
    colors: Sequence[str],
    places: Sequence[tuple[int, int]] = _PLACES,
) -> None:
    """Write a name beside each point, at the first place where it covers no other name or point.

    ``places`` are relative to the point.
    """
    axes.figure.canvas.draw()
    taken = [_dot(axes, x, y) for _, x, y in points]
    for (name, x, y), color in zip(points, colors, strict=True):
        for dx, dy in places:
            text = axes.annotate(
                name,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                ha="left" if dx > 0 else "right" if dx < 0 else "center",
                va="center",
                color=color,
                fontsize=7.5,
            )
            box = text.get_window_extent().padded(1)
            frame = axes.get_window_extent().padded(6)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _dot(axes: Any, x: float, y: float) -> Any:
    from matplotlib.transforms import Bbox

    at_x, at_y = axes.transData.transform((x, y))
    return Bbox.from_extents(at_x - 3, at_y - 3, at_x + 3, at_y + 3)
