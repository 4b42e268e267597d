"""The four pictures of the results: fidelity, a slow link, scaling and kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from bench.fidelity.rows import Row
from bench.plots import Draw, label_points, plot
from bench.slow_link.hooks import PLAIN
from bench.slow_link.record import Course
from commhooks.cli.colors import GRAY, color_of
from commhooks.lab.units import format_rate

__all__ = ["fidelity", "kernels", "pareto_front", "scaling", "slow_link"]

MAIN = [PLAIN, "bf16", "int8", "onebit", "topk:warmup_steps=0", "powersgd:rank=4,start_step=0"]
"""The hooks that are labeled where showing all would hide them."""


def _short(hook: str) -> str:
    return hook.removeprefix("ours ").partition(":")[0]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both coordinates, by the first one."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def fidelity(by_task: dict[str, list[Row]]) -> Draw:
    """Draw the change of the loss against the bytes sent, relative to plain averaging.

    Plain averaging uses the usual optimizer of the task, also where a hook has another one.
    """

    def fill(panels: list[Any]) -> None:
        for axes, (task, found) in zip(panels, by_task.items(), strict=True):
            points = [
                (row.trained.title, 100 * row.byte_share, 100 * row.change_to_usual)
                for row in found
            ]
            colors = [color_of(row.trained.hook) for row in found]
            for row, (_, x, y), color in zip(found, points, colors, strict=True):
                low, high = (100 * pick(row.changes_to_usual) for pick in (min, max))
                axes.plot([x, x], [low, high], color=color, linewidth=1, alpha=0.6)
                axes.plot(x, y, "o", color=color, markersize=4.5)
            front = pareto_front([(x, y) for _, x, y in points])
            axes.step(*zip(*front, strict=True), where="post", color=GRAY, linestyle=":", zorder=0)
            axes.axhline(0, color=GRAY, linewidth=0.8)
            axes.set(xscale="log", title=task)
            axes.set_yscale("symlog", linthresh=5, linscale=2)
            least = min(x for _, x, _ in points)
            axes.set_xlim(least / 1.6, 150)
            shares = [x for x in (0.03, 0.1, 0.3, 1, 3, 10, 25, 50, 100) if x >= least / 1.6]
            axes.set_xticks(shares, [f"{share:g} %" for share in shares])
            axes.minorticks_off()
            ticks = [-2, 0, 2, 5, 10, 50, 200]
            top = max(100 * max(row.changes_to_usual) for row in found)
            ticks = [tick for tick in ticks if tick <= 1.5 * top]
            axes.set_ylim(-3, 1.3 * top)
            axes.set_yticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
            axes.set_ylabel("validation loss\nagainst plain averaging")
            label_points(axes, points, colors)
        panels[-1].set_xlabel("bytes sent, as a share of plain averaging's")

    return plot(4.2 * len(by_task), 1, len(by_task), fill)


def slow_link(courses: dict[str, Course]) -> Draw:
    """Draw the loss against the training time; the main hooks in color, the others gray."""

    def fill(panels: list[Any]) -> None:
        (axes,) = panels
        for hook, course in courses.items():
            xs = [point.seconds for point in course.points]
            ys = [point.validation_loss for point in course.points]
            if hook not in MAIN:
                axes.plot(xs, ys, color=GRAY, linewidth=0.7, alpha=0.35, zorder=1)
                continue
            axes.plot(xs, ys, color=color_of(hook), linewidth=1.8, zorder=2)
        goal = courses[PLAIN].lowest.validation_loss
        axes.axhline(goal, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="training time", ylabel="validation loss, nats per byte")
        axes.set_xticks([1, 10, 60, 300], ["1 s", "10 s", "1 min", "5 min"])
        axes.minorticks_off()
        axes.grid(visible=True)
        axes.set_xlim(1, 1300)
        lows = [min(p.validation_loss for p in course.points) for course in courses.values()]
        axes.set_ylim(min(lows) - 0.1, 4.2)
        main = {hook: course.points[0] for hook, course in courses.items() if hook in MAIN}
        starts = [(_short(hook), p.seconds, p.validation_loss) for hook, p in main.items()]
        label_points(axes, starts, [*map(color_of, main)], [(-4, 4), (0, 7)])

    return plot(4.2, 1, 1, fill)


def scaling(cells: Sequence[dict[str, Any]]) -> Draw:
    """Draw the time of a step against the ranks, measured and predicted, per rate of the link."""
    rates = sorted({cell["bits_per_second"] for cell in cells})
    hooks = list(dict.fromkeys(cell["hook"] for cell in cells))

    def fill(panels: list[Any]) -> None:
        for axes, rate in zip(panels, rates, strict=True):
            for hook in hooks:
                mine = [c for c in cells if (c["hook"], c["bits_per_second"]) == (hook, rate)]
                mine.sort(key=lambda cell: cell["ranks"])
                ranks = [cell["ranks"] for cell in mine]
                color = color_of(_short(hook))
                measured = [cell["measured_seconds"] for cell in mine]
                axes.plot(ranks, measured, "o-", color=color, markersize=4, label=_short(hook))
                predicted = [cell["predicted_seconds"] for cell in mine]
                axes.plot(ranks, predicted, "--", color=color, linewidth=1, alpha=0.8)
            axes.set(yscale="log", title=format_rate(rate), xlabel="ranks")
            axes.set_xticks(sorted({cell["ranks"] for cell in cells}))
            axes.set_yticks(
                [0.1, 0.2, 0.5, 1, 2, 5], ["0.1 s", "0.2 s", "0.5 s", "1 s", "2 s", "5 s"]
            )
            axes.set_ylim(0.07, 8)
            axes.minorticks_off()
            axes.grid(visible=True)
        panels[0].set_ylabel("backward: measured (solid), predicted (dashed)", fontsize=8)
        panels[0].figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="lower center",
            bbox_to_anchor=(0.5, 0.99),
            ncols=len(hooks),
            columnspacing=1,
            handlelength=1.2,
        )

    return plot(3.4, len(rates), 1, fill)


def kernels(benchmarks: Sequence[dict[str, Any]]) -> Draw:
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

    def fill(panels: list[Any]) -> None:
        (axes,) = panels
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

    return plot(5.2, 1, 1, fill)
