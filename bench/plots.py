"""The style of plots: one color per hook everywhere, readable on light and on dark pages.

Plots are SVG files with a transparent background and text in a gray that both kinds of pages show
well. matplotlib is imported when the first one is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from commhooks.cli.plots import GRAY

Draw = Callable[[Path], None]
"""Writes a plot to a file."""

_WIDTH = 6.4
BESIDE = sorted(
    ((dx, dy) for dy in range(-26, 27, 2) for dx in (5, -5, 0) if dx or abs(dy) >= 8),
    key=lambda place: (abs(place[1]), place[0] <= 0),
)
"""Places of a name, in points from its own point: the nearest first."""
BELOW = tuple((4, -dy) for dy in range(9, 100, 2))
"""Places for names of points that are close to each other, at the end of a line that leads down."""


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


def label_points(
    axes: Any,
    points: Iterable[tuple[str, float, float, str]],
    places: Sequence[tuple[int, int]] = BESIDE,
) -> None:
    """Write names beside points, each at the first place where it covers no name, line or point.

    ``points``: name, coordinates and color. Draw all lines before, and set the limits of the axes.

    Raises:
        NoPlaceError: a name fits in none of the places.
    """
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()
    frame = axes.get_window_extent().padded(6)
    taken = [text.get_window_extent() for text in axes.texts]
    for name, x, y, color in points:
        for place in places:
            text = _annotate(axes, name, (x, y), place, color=color, fontsize=8)
            box = text.get_window_extent().padded(1)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 <= frame.y1
            covers = any(box.overlaps(other) for other in taken)
            if inside and not covers and not any(_touches(line, box) for line in axes.lines):
                break
            text.remove()
        else:
            raise NoPlaceError(
                f"expected a free place for the name {name!r} beside ({x:.4g}, {y:.4g}); found "
                f"none among {len(places)}. Make the plot larger, or name fewer points"
            )
        taken.append(box)
        if places is BELOW:
            line = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            _annotate(axes, "", (x, y), (0, place[1] - 3), arrowprops=line)
            at_x, at_y = axes.transData.transform((x, y))
            taken.append(Bbox.from_extents(at_x - 2, box.y0, at_x + 2, at_y))


def _annotate(
    axes: Any, name: str, point: tuple[float, float], place: tuple[int, int], **options: Any
) -> Any:
    dx, _ = place
    side = "left" if dx > 0 else "right" if dx < 0 else "center"
    text = axes.annotate(
        name, point, place, textcoords="offset points", ha=side, va="center", **options
    )
    text.set_in_layout(False)  # the layout that places were chosen in stays
    return text


def _touches(line: Any, box: Any) -> bool:
    """Return whether a box is on a line or closer than a point to one of its markers."""
    path = line.get_transform().transform_path(line.get_path())
    has_markers, is_drawn = (s != "None" for s in (line.get_marker(), line.get_linestyle()))
    around = box.padded(1 + line.get_markersize() / 2)
    return bool(
        (has_markers and around.count_contains(path.vertices))
        or (is_drawn and path.intersects_bbox(box.padded(2), filled=False))
    )
