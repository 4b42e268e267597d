"""Draws a step on the timeline, with plain averaging and with a plan."""

from pathlib import Path

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("drawing a plan needs matplotlib: pip install 'commhooks[cli]'") from error

from commhooks.costs.timeline import Span
from commhooks.planning.plan import Plan
from commhooks.planning.problem import Problem
from commhooks.planning.solver import timelines

__all__ = ["draw_steps"]

_LANES = ("backward", "hooks", "network")
_GRAY, _COLORS = "#7f8794", ("#3b82c4", "#5aa9e6")
"""Of backward, and of buckets in turn: readable on light and on dark pages."""


def draw_steps(problem: Problem, plan: Plan, path: Path | str) -> None:
    """Write an image, whose type follows from the name of ``path``.

    Raises ValueError for a type of image that matplotlib does not know.
    """
    before, after = timelines(problem, plan)
    figure = Figure(figsize=(10, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw(upper, before, f"plain averaging: {plan.before.step_seconds * 1e3:.0f} ms a step")
    _draw(lower, after, f"with the plan: {plan.after.step_seconds * 1e3:.0f} ms a step")
    lower.set_xlabel("milliseconds since backward began")
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, spans: list[Span], title: str) -> None:
    for span in spans:
        lane = _lane(span)
        axes.barh(
            _LANES.index(lane),
            (span.end - span.start) * 1e3,
            left=span.start * 1e3,
            height=0.7,
            color=_GRAY if lane == "backward" else _COLORS[span.bucket % 2],
            alpha=1.0 if lane == "backward" else 0.6,
            edgecolor="white",
            linewidth=0.5,
        )
    ends = [span.end for span in spans if span.work == "backward"]
    axes.axvline(max(ends, default=0.0) * 1e3, color=_GRAY, linestyle=":")
    axes.set(yticks=range(len(_LANES)), yticklabels=_LANES, title=title)
    axes.invert_yaxis()


def _lane(span: Span) -> str:
    if span.work in ("backward", "unpack"):
        return "backward"
    return "hooks" if span.work == "hook" else "network"
