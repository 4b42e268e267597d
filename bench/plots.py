"""The style of plots: one color per hook everywhere, readable on light and on dark pages.

Plots are SVG files with a transparent background and text in a gray that both kinds of pages show
well. matplotlib is imported when the first one is drawn.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from commhooks.cli.plots import GRAY

Draw = Callable[[Path], None]
"""Writes a plot to a file."""

_WIDTH = 6.4
_BESIDE = sorted(
    ((dx, dy) for dy in range(-26, 27, 2) for dx in (5, -5, 0) if dx or abs(dy) >= 8),
    key=lambda place: (abs(place[1]), place[0] <= 0),
)
"""Places of a name, in points from its own point: the nearest first."""
_SIDES = {5: "left", -5: "right", 0: "center"}


class NoPlaceError(ValueError):
    """A name fits nowhere."""


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
            "figure.constrained_layout.use": True,
        }
        names = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "grid.color")
        style |= dict.fromkeys((*names, "xtick.color", "ytick.color"), GRAY)
        with mpl.rc_context(style):
            figure, axes = pyplot.subplots(rows, columns, figsize=(_WIDTH, height), squeeze=False)
            fill(list(axes.flat))
            figure.savefig(path, metadata={"Date": None}, transparent=True, bbox_inches="tight")
            pyplot.close(figure)

    return draw


def label_points(axes: Any, points: Iterable[tuple[str, float, float, str]]) -> None:
    """Write names beside points, each at the first place where it covers no name, line or point.

    ``points``: name, coordinates and color. Draw all lines before, and set the limits of the axes.

    Raises:
        NoPlaceError: a name fits in none of the places.
    """
    axes.figure.canvas.draw()
    frame = axes.get_window_extent().padded(6)
    names: list[Any] = []
    drawn = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
    pixels = [pixel for path in drawn for pixel in path.interpolated(100).vertices]
    for name, x, y, color in points:
        for dx, dy in _BESIDE:
            text = axes.annotate(
                name,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                ha=_SIDES[dx],
                va="center",
                color=color,
                fontsize=8,
            )
            text.set_in_layout(False)  # the layout that places were chosen in stays
            box = text.get_window_extent().padded(1)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 <= frame.y1
            covers = any(box.overlaps(other) for other in names)
            if inside and not covers and not box.padded(2.5).count_contains(pixels):
                names.append(box)
                break
            text.remove()
        else:
            raise NoPlaceError(
                f"expected a free place for the name {name!r} beside ({x:.4g}, {y:.4g}); found "
                f"none among {len(_BESIDE)}. Make the plot larger, or name fewer points"
            )
