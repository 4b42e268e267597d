"""What the runs say: a table for each task, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

from bench.fidelity.record import Record, Run
from bench.fidelity.subjects import REFERENCE, Subject, subjects
from bench.fidelity.tasks import TASKS

__all__ = ["plot", "report"]

_COLUMNS = (
    "hook",
    "seeds",
    "validation loss",
    "to plain",
    "by seed",
    "allowed",
    "accuracy",
    "bytes",
    "to plain",
)


@dataclass(frozen=True)
class _Row:
    """A hook's runs, each beside plain averaging on the same data."""

    subject: Subject
    runs: Sequence[Run]
    plain: Sequence[Run]

    @property
    def changes(self) -> list[float]:
        """Of the validation loss, by seed, as a share of that of plain averaging."""
        return [run.loss / plain.loss - 1 for run, plain in zip(self.runs, self.plain, strict=True)]

    @property
    def byte_share(self) -> float:
        return _mean(run.wire_bytes for run in self.runs) / _mean(p.wire_bytes for p in self.plain)

    def cells(self) -> list[str]:
        change = _mean(self.changes)
        is_within = change <= self.subject.tolerance
        name = self.subject.label + (f" ({self.subject.recipe})" if self.subject.recipe else "")
        return [
            name,
            str(len(self.runs)),
            f"{_mean(run.loss for run in self.runs):.4f}",
            f"{change:+.1%}" if is_within else f"**{change:+.1%}**",
            ", ".join(f"{c:+.1%}" for c in self.changes),
            f"{self.subject.tolerance:.0%}",
            _accuracy(self.runs),
            f"{_mean(run.wire_bytes for run in self.runs):,.0f}",
            f"{self.byte_share:.3f}",
        ]


def report(record: Record, title: str) -> str:
    """Markdown, of the hooks that have been run at their present defaults."""
    about = record.about
    where = (
        f"{about['ranks']} ranks, {about['cpu']}, {about['cores']} cores, Python "
        f"{about['python']}, torch {about['torch']}. Columns: see ../README.md. Made, or gone on "
        f"with, by `python -m bench.fidelity bench/results/{title}`."
    )
    picture = f"![Change of the validation loss, by hook]({title}.svg)"
    lines = [f"# Does it still learn? {title}", "", where, "", picture]
    for task, kind in TASKS.items():
        rows = _rows(record, task)
        if not rows:
            continue
        lines += ["", f"## {task}, {kind.steps} steps", ""]
        lines += [_spread(recipe, runs) for recipe, runs in _plain(record, task).items()]
        lines += ["", f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
        lines += [f"| {' | '.join(row.cells())} |" for row in rows]
        run = {row.subject.hook for row in rows}
        if missing := [subject.label for subject in subjects() if subject.hook not in run]:
            lines += ["", f"Not run yet at the present defaults: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def plot(record: Record, path: Path) -> None:
    """One column per task: a dot per seed, at how much more or less loss than plain averaging."""
    tasks = {task: rows for task in TASKS if (rows := _rows(record, task))}
    if not tasks:
        return
    mpl.rcParams["svg.hashsalt"] = "fidelity"  # the same file for the same runs
    names = [subject.label for subject in subjects()]
    figure, axes = plt.subplots(
        1, len(tasks), sharey=True, squeeze=False, figsize=(5 * len(tasks), 0.25 * len(names) + 1)
    )
    for axis, (task, rows) in zip(axes[0], tasks.items(), strict=True):
        axis.axvspan(-0.02, 0.02, color="0.92")
        axis.axvline(0, color="0.5", linewidth=0.8)
        for row in rows:
            heights = [names.index(row.subject.label)] * len(row.changes)
            axis.plot(row.changes, heights, "o", markersize=4, alpha=0.6, color="C0")
            axis.plot(_mean(row.changes), heights[0], "|", markersize=12, color="C1")
        axis.set_xscale("symlog", linthresh=0.05)
        axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.set_title(f"{task}: validation loss, to plain averaging")
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="y", linewidth=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _rows(record: Record, task: str) -> list[_Row]:
    plain = _plain(record, task)
    rows = []
    for subject in subjects():
        recipe = subject.recipe or TASKS[task].usual
        reference = {run.seed: run for run in plain.get(_reference_recipe(subject, task), [])}
        runs = [
            run
            for run in record.runs(task, subject.hook, subject.create().to_config(), recipe)
            if run.seed in reference
        ]
        if runs:
            rows.append(_Row(subject, runs, [reference[run.seed] for run in runs]))
    return rows


def _plain(record: Record, task: str) -> dict[str, list[Run]]:
    """The references, by recipe."""
    config = Subject(REFERENCE).create().to_config()
    recipes = dict.fromkeys(_reference_recipe(subject, task) for subject in subjects())
    found = {recipe: record.runs(task, REFERENCE, config, recipe) for recipe in recipes}
    return {recipe: runs for recipe, runs in found.items() if runs}


def _reference_recipe(subject: Subject, task: str) -> str:
    return subject.reference_recipe or TASKS[task].usual


def _spread(recipe: str, runs: Sequence[Run]) -> str:
    losses = [run.loss for run in runs]
    text = f"- Plain averaging, {recipe}: {_mean(losses):.4f}, accuracy {_accuracy(runs)}; "
    if len(runs) == 1:
        return text + "one seed, so its spread is not known."
    low, high = min(losses), max(losses)
    share = (high - low) / _mean(losses)
    return text + f"{len(runs)} seeds, from {low:.4f} to {high:.4f}, a spread of {share:.1%}."


def _accuracy(runs: Sequence[Run]) -> str:
    known = [run.accuracy for run in runs if run.accuracy is not None]
    return f"{statistics.mean(known):.3f}" if known else "-"


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)
