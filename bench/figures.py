"""The four plots of the results: fidelity, a slow link, scaling and kernels.

One color per hook everywhere. Plots are SVG files, readable on light and on dark pages: with a
transparent background, and text in a gray that both kinds of pages show well.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

from bench.fidelity.runs import Row
from bench.language import ALONE, HEADLINE, Courses, percent
from commhooks.cli.plots import GRAY, color_of, line_styles
from commhooks.costs.units import format_rate

LABELED = (
    *("bf16", "int8", "int4", "int2", "terngrad", "onebit", "topk", "powersgd"),
    *("local_sgd", "dgc", "demo", "diloco"),
    *("one-worker DiLoCo", "diloco with int4", "Streaming DiLoCo", "SparseLoCo"),  # only on gpt
)
"""The hooks in the plot of the fidelity; wrappers and more hooks are in tables."""
# Ticks of logarithmic axes; those outside the limits are not drawn.
_SHARES = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_CHANGES = (-2, 0, 2, 5, 10, 20, 50, 100)
_SECONDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 3, 5)
_WIDTH = 6.4
_COLORED = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "grid.color")
_STYLE: dict[Any, Any] = {
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


@contextmanager
def plot(path: Path, height: float, columns: int = 1, rows: int = 1) -> Iterator[list[Any]]:
    """Write a plot to a file after its axes have been filled. They come in reading order."""
    mpl.use("svg")
    with mpl.rc_context(_STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=(_WIDTH, height), squeeze=False)
        yield list(axes.flat)
        figure.savefig(path, metadata={"Date": None}, transparent=True, bbox_inches="tight")
        pyplot.close(figure)


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
    """Draw the change of the loss against the bytes sent, relative to plain averaging.

    Names are in a column beside the plot, in the order of the losses, with lines to their points.
    """
    name = {"textcoords": "axes fraction", "fontsize": 8, "va": "center"}
    line = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.7, "relpos": (0, 0.5)}
    with plot(path, 3.1 * len(by_task), rows=len(by_task)) as panels:
        for axes, (task, rows) in zip(panels, by_task.items(), strict=True):
            shown = [row for row in rows if row.trained.title in LABELED]
            shown.sort(key=lambda row: (row.change_to_usual, -row.byte_share))
            points = [(100 * row.byte_share, 100 * row.change_to_usual) for row in shown]
            for place, (row, point) in enumerate(zip(shown, points, strict=True)):
                ends = [100 * pick(row.changes_to_usual) for pick in (min, max)]
                color = color_of(row.trained.hook)
                axes.plot([point[0]] * 2, ends, color=color, linewidth=1, alpha=0.6)
                axes.plot(*point, "o", color=color, markersize=4.5)
                beside = (1.03, (place + 0.5) / len(shown))
                name |= {"color": color, "arrowprops": line | {"color": color}}
                axes.annotate(row.trained.title, point, beside, **name)
            front = zip(*pareto_front(points), strict=True)
            axes.plot(*front, color=GRAY, linestyle=":", drawstyle="steps-post", zorder=0)
            axes.axhline(0, color=GRAY, linewidth=0.8)
            axes.set(xscale="log", title=task, ylabel="validation loss\nagainst plain averaging")
            axes.set_yscale("symlog", linthresh=5, linscale=2)
            axes.set_xticks(_SHARES, [f"{share:g} %" for share in _SHARES])
            axes.set_yticks(_CHANGES, [f"{change:+d} %" if change else "0" for change in _CHANGES])
            axes.minorticks_off()
            axes.set_xlim(min(points)[0] / 1.6, 160)
            axes.set_ylim(-3, 140 * max(max(row.changes_to_usual) for row in shown))
        panels[-1].set_xlabel("bytes sent, as a share of plain averaging's")


def language(courses: Courses, path: Path) -> None:
    """Draw the loss against the training time; a dotted line is plain averaging's last loss.

    Curves are means over seeds, with their range around them.
    """
    found = courses.over(HEADLINE)
    styles = line_styles([course.name for course in found])
    styles[ALONE] = {"color": GRAY, "linestyle": "-"}
    with plot(path, 4.2) as (axes,):
        for course in found:
            steps, losses, lowest, highest = zip(*course.curve, strict=True)
            seconds = [course.seconds(HEADLINE, step) for step in steps]
            style = styles[course.name]
            change = percent(course.row.change) if course is not courses.plain else ""
            label, end = f"{course.name} {change}", {"marker": "o", "markevery": [-1]}
            axes.plot(seconds, losses, linewidth=1.8, markersize=4, label=label, **end, **style)
            axes.fill_between(seconds, lowest, highest, color=style["color"], alpha=0.15, lw=0)
        final = courses.plain.curve[-1][1]
        axes.axhline(final, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel=f"training time over {format_rate(HEADLINE)}")
        axes.set(ylabel="validation loss, nats per byte", ylim=(0.95 * final, 1.7 * final))
        marks = {15: "15 s", 60: "1 min", 300: "5 min", 900: "15 min", 3600: "1 h"}
        axes.set_xticks(list(marks), list(marks.values()))
        axes.minorticks_off()
        axes.grid(visible=True)
        axes.legend(title="the shortest first; loss at the end", fontsize=8)


def scaling(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the time of a step against the ranks, measured and predicted, per rate of the link."""
    cells = sorted(cells, key=lambda cell: cell["ranks"])
    rates = sorted({cell["bits_per_second"] for cell in cells})
    hooks = list(dict.fromkeys(cell["hook"] for cell in cells))
    with plot(path, 3.6, columns=len(rates)) as panels:
        for axes, rate in zip(panels, rates, strict=True):
            for hook in hooks:
                mine = [c for c in cells if (c["hook"], c["bits_per_second"]) == (hook, rate)]
                ranks = [cell["ranks"] for cell in mine]
                color = color_of(hook)
                measured = [cell["step_seconds"] for cell in mine]
                axes.plot(ranks, measured, "o-", color=color, markersize=4, label=short(hook))
                predicted = [cell["predicted_seconds"] for cell in mine]
                axes.plot(ranks, predicted, "--", color=color, linewidth=1, alpha=0.8)
            axes.set(yscale="log", title=format_rate(rate), xlabel="ranks")
            axes.set_xticks(sorted({cell["ranks"] for cell in cells}))
            axes.margins(y=0.06)  # each panel has its own scale
            limits = axes.get_ylim()
            axes.set_yticks(_SECONDS, [f"{second:g} s" for second in _SECONDS])
            axes.set_ylim(limits)
            axes.minorticks_off()
            axes.grid(visible=True)
        panels[0].set_ylabel("time")
        for style, label in (("o-", "measured"), ("--", "predicted")):
            panels[0].plot([], [], style, color=GRAY, markersize=4, label=label)
        shown = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(*shown, loc="outside upper center", ncols=4)


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
        for codec, found in shares.items():
            color = color_of(re.split(r"[ ,]", codec)[0])
            axes.plot(list(found.values()), [codec] * len(found), color=color, alpha=0.3)
            for kind, share in found.items():
                axes.plot(share, codec, styles[kind][0], color=color, markersize=5)
        for marker, label in styles.values():
            axes.plot([], [], marker, color=GRAY, label=label, markersize=5)
        axes.axvline(1, color=GRAY, linewidth=1)
        axes.text(1, 1.02, "a plain copy", transform=axes.get_xaxis_transform(), ha="center")
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.4), xlabel="bandwidth, as a share of that of a plain copy")
        axes.grid(visible=True, axis="x")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.15), ncols=2)
