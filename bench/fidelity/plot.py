"""A picture of what the runs say."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

from bench.fidelity.record import Record
from bench.fidelity.rows import rows
from bench.fidelity.subjects import subjects
from bench.fidelity.tasks import TASKS

__all__ = ["plot"]


def plot(record: Record, path: Path) -> None:
    """One column per task: a dot per seed, at how much more or less loss than plain averaging."""
    tasks = {task: found for task in TASKS if (found := rows(record, task))}
    if not tasks:
        return
    mpl.rcParams["svg.hashsalt"] = "fidelity"  # the same file for the same runs
    names = [subject.label for subject in subjects()]
    figure, axes = plt.subplots(
        1, len(tasks), sharey=True, squeeze=False, figsize=(5 * len(tasks), 0.25 * len(names) + 1)
    )
    for axis, (task, found) in zip(axes[0], tasks.items(), strict=True):
        axis.axvspan(-0.02, 0.02, color="0.92")
        axis.axvline(0, color="0.5", linewidth=0.8)
        for row in found:
            heights = [names.index(row.subject.label)] * len(row.changes)
            axis.plot(row.changes, heights, "o", markersize=4, alpha=0.6, color="C0")
            axis.plot(row.change, heights[0], "|", markersize=12, color="C1")
        axis.set_xscale("symlog", linthresh=0.05)
        axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.set_title(f"{task}: validation loss, to plain averaging")
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="y", linewidth=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
