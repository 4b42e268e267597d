"""Plots of comparisons and predictions, with one color per hook."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from colorsys import hls_to_rgb
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import EngFormatter, NullFormatter

from commhooks import algorithms
from commhooks.costs.timeline import Interval, Timing
from commhooks.costs.units import format_duration, format_rate
from commhooks.lab.comparison import Comparison
from commhooks.lab.simulation import Study, curve_sizes
from commhooks.planning import Plan, Problem

GRAY = "#7f8794"
"""The color of text, axes, and what is only shown for comparison."""

_HUES = {
    "exact": (202, 222),  # blue
    "quantized": (335, 405),  # pink to orange
    "sparse": (80, 165),  # green
    "lowrank": (250, 265),  # violet
    "averaging": (180, 200),  # cyan
}
"""The hues of each family of hooks, in degrees, of which each hook takes one. All have about the
same lightness, and are readable on light and on dark pages."""
_OTHER = "#a9745b"  # wrappers and hooks of other packages
_DASHES = ("-", "--", ":", "-.")
_WIDTH, _HEIGHT = 5.2, 4.2  # of one panel, in inches
_BAR_HEIGHT = 0.16
_LANES = ("backward", "hooks", "network")
_OF_BUCKETS = ("#3b82c4", "#5aa9e6")

Panel = Callable[[Axes], None]


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw step times by hook and link; after training, also loss against time and bytes."""
    title = f"{comparison.model}, {comparison.world_size} ranks"
    save(panels(comparison), path, title=title)


def panels(comparison: Comparison) -> list[Panel]:
    """Return the functions that draw the parts of the image."""
    trained = [
        link for link in comparison.links if any(row.training for row in comparison.over(link))
    ]
    found: list[Panel] = [partial(_draw_times, comparison=comparison)]
    found += [partial(_draw_training, comparison=comparison, link=link) for link in trained]
    if trained:
        found.append(
            partial(_draw_training, comparison=comparison, link=trained[-1], by_bytes=True)
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


def draw_curves(study: Study, model: str, path: Path) -> None:
    """Draw curves of predicted step times against the number of ranks."""
    sizes = curve_sizes(study.network)

    def draw(axes: Axes) -> None:
        for hook, style in line_styles(study.hooks).items():
            seconds = [math.nan if s is None else s for s in study.curve(hook, sizes)]
            axes.plot(sizes, seconds, marker=".", label=hook, **style)
        axes.axhline(study.alone_seconds, color=GRAY, linestyle=":", label="no communication")
        axes.axvline(study.network.size, color="lightgray", zorder=0)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds per step")
        axes.legend()

    title = f"{model} at {format_rate(study.network.link.bits_per_second)}, predicted"
    save([draw], path, title=title)


def color_of(hook: str) -> str:
    """Return the color of a hook, whatever its options."""
    return _colors().get(hook.partition(":")[0], _OTHER)


@cache
def _colors() -> dict[str, str]:
    colors = {"torch": GRAY}
    for family, (first, last) in _HUES.items():
        names = [name for name, at in algorithms.HOOKS.items() if re.match(rf"{family}\b", at)]
        for place, name in enumerate(names):
            hue = (first + (last - first) * place / len(names)) % 360 / 360
            lightness = (0.44, 0.52, 0.6)[place % 3]  # so that neighbors differ more
            colors[name] = to_hex(hls_to_rgb(hue, lightness, 0.75))
    return colors


def line_styles(hooks: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return matplotlib's options for each hook's line; lines of one family differ in dashes."""
    seen: Counter[str] = Counter()
    styles = {}
    for hook in hooks:
        family = re.split(r"\W", algorithms.HOOKS.get(hook.partition(":")[0], ""))[0]
        styles[hook] = {"color": color_of(hook), "linestyle": _DASHES[seen[family] % len(_DASHES)]}
        seen[family] += 1
    return styles


def _draw_times(axes: Axes, comparison: Comparison) -> None:
    """Draw a group of bars per hook, one bar per link; predicted bars are hatched."""
    height = 0.8 / len(comparison.links)
    hooks = list(dict.fromkeys((*comparison.hooks, *(f.hook for f in comparison.failures))))
    bars = len(hooks) * len(comparison.links)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(max(_HEIGHT, 1.2 + _BAR_HEIGHT * bars))  # names must not overlap
    for index, link in enumerate(comparison.links):
        rows = comparison.over(link)
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


def _draw_training(
    axes: Axes, comparison: Comparison, link: str, *, by_bytes: bool = False
) -> None:
    """Draw the loss against the time over a link, or against the bytes sent."""
    styles = line_styles(comparison.hooks)
    for row in comparison.over(link):
        if row.training:
            xs = [point.wire_bytes if by_bytes else point.seconds for point in row.training]
            losses = [point.validation_loss for point in row.training]
            axes.plot(xs, losses, marker="o", ms=3, label=row.hook, **styles[row.hook])
    predicted = ", predicted" if comparison.kind_of(link) == "predicted" else ""
    axes.set(
        xscale="log",
        xlabel="bytes sent per rank" if by_bytes else f"training time over {link}{predicted}",
        ylabel="validation loss",
    )
    axes.xaxis.set_major_formatter(EngFormatter("B" if by_bytes else "s"))
    axes.legend(title="hook")


def draw_steps(problem: Problem, plan: Plan, path: Path) -> None:
    """Draw a step before and after, bucket by bucket."""
    before, after = problem.intervals({}), problem.intervals(plan.hook_of())
    end = max(each.end for each in (*before, *after))

    def draw(axes: Axes, intervals: list[Interval], title: str, timing: Timing) -> None:
        for each in intervals:
            lane = {"backward": 0, "unpack": 0, "hook": 1}.get(each.work, 2)
            color = _OF_BUCKETS[each.bucket % 2] if lane else GRAY
            axes.barh(lane, each.end - each.start, 0.7, each.start, color=color, edgecolor="white")
        launched = max((each.end for each in intervals if each.work == "backward"), default=0.0)
        axes.axvline(launched, color=GRAY, linestyle=":")
        title = f"{title}: {format_duration(timing.step_seconds)} a step"
        axes.set(title=title, xlabel="time since backward began", xlim=(0, end))
        axes.set_yticks(range(len(_LANES)), _LANES)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(EngFormatter("s"))

    panels: list[Panel] = [
        partial(draw, intervals=before, title="plain averaging", timing=plan.before),
        partial(draw, intervals=after, title="with the plan", timing=plan.after),
    ]
    save(panels, path)
