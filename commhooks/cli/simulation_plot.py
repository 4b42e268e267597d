"""Curves of step time against the number of ranks."""

from pathlib import Path

from matplotlib.figure import Figure

from commhooks.cli.colors import GRAY, line_styles
from commhooks.lab.simulation import Study

__all__ = ["draw_curves"]


def draw_curves(study: Study, path: Path, title: str) -> None:
    """Write an image, whose type follows from the name of ``path``.

    Raises ValueError for a type of image that matplotlib does not know.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    sizes = study.curve_sizes()
    for hook, style in line_styles(study.hooks).items():
        axes.plot(sizes, study.curve(hook, sizes), marker=".", label=hook, **style)
    axes.axhline(study.alone_seconds, color=GRAY, linestyle=":", label="no communication")
    axes.axvline(study.network.size, color="lightgray", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds per step", title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
