"""A comparison as an image."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, NullFormatter

from commhooks.cli.colors import line_styles
from commhooks.lab.comparison import Comparison, Row, TrainingPoint

__all__ = ["draw_comparison", "panels", "save"]

_WIDTH, _HEIGHT = 5.2, 4.2  # of one panel, in inches
_BAR_HEIGHT = 0.16

Panel = Callable[[Axes], None]


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw step times by hook and link; after training, also loss against time and bytes."""
    title = f"{comparison.model}, {comparison.world_size} ranks"
    save(panels(comparison), path, title=title)


def panels(comparison: Comparison) -> list[Panel]:
    """Return the functions that draw the parts of the image."""
    trained = [
        link for link in comparison.links if any(row.training for row in _rows(comparison, link))
    ]
    found: list[Panel] = [functools.partial(_draw_times, comparison=comparison)]
    found += [functools.partial(_draw_losses, comparison=comparison, link=link) for link in trained]
    if trained:
        found.append(
            functools.partial(_draw_losses_by_bytes, comparison=comparison, link=trained[-1])
        )
    return found


def save(panels: Sequence[Panel], file: Path | IO[str], *, title: str = "", **options: Any) -> None:
    """Draw panels side by side to a file. Options are those of ``Figure.savefig``."""
    mpl.use("Agg")
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure, grid = plt.subplots(
            1,
            len(panels),
            figsize=(_WIDTH * len(panels), _HEIGHT),
            layout="constrained",
            squeeze=False,
        )
        for draw, axes in zip(panels, grid[0], strict=True):
            draw(axes)
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.35)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title)
        figure.savefig(file, dpi=160, **options)
    plt.close(figure)


def _draw_times(axes: Axes, comparison: Comparison) -> None:
    """Draw a group of bars per hook, one bar per link; predicted bars are hatched."""
    height = 0.8 / len(comparison.links)
    hooks = list(dict.fromkeys((*comparison.hooks, *(f.hook for f in comparison.failures))))
    bars = len(hooks) * len(comparison.links)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(max(_HEIGHT, 1.2 + _BAR_HEIGHT * bars))  # names must not overlap
    for index, link in enumerate(comparison.links):
        rows = _rows(comparison, link)
        positions = [hooks.index(row.hook) + index * height for row in rows]
        measured = rows[0].measured
        axes.barh(
            positions,
            [row.step_seconds for row in rows],
            height,
            label=link if measured else f"{link} (predicted)",
            hatch=None if measured else "//",
            alpha=1.0 if measured else 0.6,
        )
    middle = (len(comparison.links) - 1) * height / 2
    for failure in comparison.failures:
        position = hooks.index(failure.hook) + height * comparison.links.index(
            failure.link or comparison.links[0]
        )
        axes.annotate(
            " failed", (0, position), xycoords=("axes fraction", "data"), va="center", color="C3"
        )
    axes.set_yticks([base + middle for base in range(len(hooks))], hooks)
    axes.set_ylim(len(hooks) - 0.4, -0.6)
    seconds = [row.step_seconds for row in comparison.rows]
    if max(seconds) > 10 * min(seconds):  # otherwise a logarithmic axis may have no label
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set_xlabel("time of a step")
    axes.legend(title="link")


def _draw_losses(axes: Axes, comparison: Comparison, link: str) -> None:
    _draw_training(axes, comparison, link, lambda point: point.seconds)
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    predicted = ", predicted" if comparison.kind_of(link) == "predicted" else ""
    axes.set_xlabel(f"training time over {link}{predicted}")


def _draw_losses_by_bytes(axes: Axes, comparison: Comparison, link: str) -> None:
    _draw_training(axes, comparison, link, lambda point: point.wire_bytes)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.set_xlabel("bytes sent per rank")


def _draw_training(
    axes: Axes, comparison: Comparison, link: str, along: Callable[[TrainingPoint], float]
) -> None:
    styles = line_styles(comparison.hooks)
    for row in _rows(comparison, link):
        if row.training:
            losses = [point.validation_loss for point in row.training]
            xs = [along(point) for point in row.training]
            axes.plot(xs, losses, marker="o", ms=3, label=row.hook, **styles[row.hook])
    axes.set_xscale("log")
    axes.set_ylabel("validation loss")
    axes.legend(title="hook")


def _rows(comparison: Comparison, link: str) -> list[Row]:
    return [row for row in comparison.rows if row.link == link]
