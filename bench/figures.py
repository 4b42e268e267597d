"""The four plots of the results: fidelity, a slow link, scaling and kernels.

One color per hook everywhere. Plots are SVG files, readable on light and on dark pages: with a
transparent background, and text in a gray that both kinds of pages show well.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

from bench.fidelity.runs import Row
from bench.slow_link import Race
from commhooks.cli.plots import GRAY, color_of, line_styles
from commhooks.costs.units import format_rate

LABELED = (
    *("bf16", "int8", "int4", "int2", "terngrad", "onebit", "topk", "powersgd"),
    *("local_sgd", "dgc", "demo", "diloco"),
    *("one-worker DiLoCo", "diloco with int4", "Streaming DiLoCo", "SparseLoCo"),  # only on gpt
)
"""The hooks in the plot of the fidelity; wrappers and more hooks are in tables."""
_WIDTH = 6.4
_COLORED = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "grid.color")
_STYLE = {
    **dict.fromkeys((*_COLORED, "xtick.color", "ytick.color"), GRAY),
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
_BESIDE = sorted(
    ((dx, dy) for dy in range(-26, 27, 2) for dx in (5, -5, 0) if dx or abs(dy) >= 8),
    key=lambda place: (abs(place[1]), place[0] <= 0),
)
"""Places of a name, in points from its own point: the nearest first."""
_SIDES = {5: "left", -5: "right", 0: "center"}


@contextmanager
def plot(path: Path, height: float, columns: int = 1, rows: int = 1) -> Iterator[list[Any]]:
    """Write a plot to a file after its axes have been filled. They come in reading order."""
    mpl.use("svg")
    with mpl.rc_context(_STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=(_WIDTH, height), squeeze=False)
        yield list(axes.flat)
        figure.savefig(path, metadata={"Date": None}, transparent=True, bbox_inches="tight")
        pyplot.close(figure)


def label_points(axes: Any, points: Iterable[tuple[str, float, float, str]]) -> None:
    """Write names beside points, each at the first place where it covers no name, line or point.

    ``points``: name, coordinates and color. Draw all lines before, and set the limits of the axes.

    Raises:
        ValueError: a name fits in none of the places.
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
            raise ValueError(
                f"expected a free place for the name {name!r} beside ({x:.4g}, {y:.4g}); found "
                f"none among {len(_BESIDE)}. Make the plot larger, or name fewer points"
            )


def short(hook: str) -> str:
    """Return the name of a hook as plots and tables show it: with its rank, if it has one."""
    name, _, options = hook.partition(":")
    rank = re.match(r"rank=\d+", options)
    return f"{name}, {rank[0].replace('=', ' ')}" if rank else name


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both coordinates, by the first one."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def fidelity(by_task: dict[str, list[Row]], path: Path) -> None:
    """Draw the change of the loss against the bytes sent, relative to plain averaging."""
    with plot(path, 3.1 * len(by_task), rows=len(by_task)) as panels:
        labels = []
        for axes, (task, rows) in zip(panels, by_task.items(), strict=True):
            found = [row for row in rows if row.trained.title in LABELED]
            points = []
            for row in found:
                x, y = 100 * row.byte_share, 100 * row.change_to_usual
                color = color_of(row.trained.hook)
                seeds = [100 * change for change in row.changes_to_usual]
                axes.plot([x, x], [min(seeds), max(seeds)], color=color, linewidth=1, alpha=0.6)
                axes.plot(x, y, "o", color=color, markersize=4.5)
                points.append((row.trained.title, x, y, color))
            labels.append(points)
            front = pareto_front([(x, y) for _, x, y, _ in points])
            corners = [(x, before) for (_, before), (x, _) in itertools.pairwise(front)]
            steps = sorted([*front, *corners], key=lambda point: (point[0], -point[1]))
            axes.plot(*zip(*steps, strict=True), color=GRAY, linestyle=":", zorder=0)
            axes.axhline(0, color=GRAY, linewidth=0.8)
            axes.set(xscale="log", title=task, ylabel="validation loss\nagainst plain averaging")
            axes.set_yscale("symlog", linthresh=5, linscale=2)
            least, most = (pick(x for _, x, _, _ in points) for pick in (min, max))
            axes.set_xlim(least / 1.6, 1.6 * most)
            shares = [x for x in (0.03, 0.1, 0.3, 1, 3, 10, 25, 50, 100) if x >= least / 1.6]
            axes.set_xticks(shares, [f"{share:g} %" for share in shares])
            axes.minorticks_off()
            top = max(100 * max(row.changes_to_usual) for row in found)
            ticks = [tick for tick in (-2, 0, 2, 5, 10, 20, 50, 100) if tick <= 1.5 * top]
            axes.set_ylim(-3, 1.4 * top)
            axes.set_yticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
        panels[-1].set_xlabel("bytes sent, as a share of plain averaging's")
        for axes, points in zip(panels, labels, strict=True):
            label_points(axes, sorted(points, key=lambda point: -point[1]))


def slow_link(race: Race, path: Path) -> None:
    """Draw the loss against the training time; a dotted line is plain averaging's lowest loss."""
    styles = line_styles(race.courses)
    with plot(path, 4.2) as (axes,):
        for hook in dict.fromkeys((*race.arrivals, *race.courses)):
            points = race.courses[hook].points
            xs, ys = zip(*((p.seconds, p.validation_loss) for p in points), strict=True)
            axes.plot(xs, ys, linewidth=1.8, label=short(hook), **styles[hook])
        axes.axhline(race.goal.validation_loss, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="training time", ylabel="validation loss, nats per byte")
        axes.set_xticks([5, 10, 60, 300, 900], ["5 s", "10 s", "1 min", "5 min", "15 min"])
        axes.minorticks_off()
        axes.grid(visible=True)
        axes.legend(title="in the order of arrival")


def scaling(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the time of a step against the ranks, measured and predicted, per rate of the link."""
    rates = sorted({cell["bits_per_second"] for cell in cells})
    hooks = list(dict.fromkeys(cell["hook"] for cell in cells))
    with plot(path, 3.6, columns=len(rates)) as panels:
        for axes, rate in zip(panels, rates, strict=True):
            for hook in hooks:
                mine = [c for c in cells if (c["hook"], c["bits_per_second"]) == (hook, rate)]
                mine.sort(key=lambda cell: cell["ranks"])
                ranks = [cell["ranks"] for cell in mine]
                color = color_of(short(hook).partition(",")[0])
                measured = [cell["step_seconds"] for cell in mine]
                axes.plot(ranks, measured, "o-", color=color, markersize=4, label=short(hook))
                predicted = [cell["predicted_seconds"] for cell in mine]
                axes.plot(ranks, predicted, "--", color=color, linewidth=1, alpha=0.8)
            axes.set(yscale="log", title=format_rate(rate), xlabel="ranks")
            axes.set_xticks(sorted({cell["ranks"] for cell in cells}))
            axes.margins(y=0.06)  # each panel has its own scale
            seconds = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 3, 5)
            low, high = axes.get_ylim()
            ticks = [tick for tick in seconds if low <= tick <= high]
            axes.set_yticks(ticks, [f"{tick:g} s" for tick in ticks])
            axes.minorticks_off()
            axes.grid(visible=True)
        panels[0].set_ylabel("time")
        for style, label in (("o-", "measured"), ("--", "predicted")):
            panels[0].plot([], [], style, color=GRAY, markersize=4, label=label)
        panels[0].figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4
        )


def kernels(benchmarks: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the bandwidth of each codec as a share of that of a plain copy."""
    styles = {
        "plain": ("o", "encode"),
        "with feedback": ("s", "encode, adding and keeping errors"),
        "1": ("<", "decode one message"),
        "4": (">", "decode and average four"),
    }
    shares: dict[str, dict[str, float]] = {}
    for row in benchmarks:
        if match := re.fullmatch(r"test_(?:en|de)code\[(.+)-([^-]+)\]", row["name"]):
            shares.setdefault(match[1], {})[match[2]] = row["extra_info"]["share_of_copy"]
    with plot(path, 5.2) as (axes,):
        for position, (codec, found) in enumerate(shares.items()):
            color = color_of(re.split(r"[ ,]", codec)[0])
            axes.plot(
                [min(found.values()), max(found.values())], [position] * 2, color=color, alpha=0.3
            )
            for kind, share in found.items():
                axes.plot(share, position, styles[kind][0], color=color, markersize=5)
        for marker, label in styles.values():
            axes.plot([], [], marker, color=GRAY, label=label, markersize=5)
        axes.axvline(1, color=GRAY, linewidth=1)
        axes.text(1, 1.02, "a plain copy", transform=axes.get_xaxis_transform(), ha="center")
        axes.set_yticks(range(len(shares)), list(shares))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.4)
        axes.set_xlabel("bandwidth, as a share of that of a plain copy")
        axes.grid(visible=True, axis="x")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.15), ncols=2)
