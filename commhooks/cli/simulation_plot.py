"""Curves of step time against the number of ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

__all__ = ["plot_curves"]


def plot_curves(
    path: Path,
    sizes: Sequence[int],
    step_seconds: Mapping[str, Sequence[float]],
    *,
    alone_seconds: float,
    title: str,
    marked_size: int,
) -> None:
    """Writes an image, of the type that the name of ``path`` says. Seconds by hook, one per size.

    ``alone_seconds``: of a step without communication, the floor. Raises ValueError for a type of
    image that matplotlib does not know.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for hook, seconds in step_seconds.items():
        axes.plot(sizes, seconds, marker=".", label=hook)
    axes.axhline(alone_seconds, color="gray", linestyle=":", label="no communication")
    axes.axvline(marked_size, color="lightgray", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds per step", title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
