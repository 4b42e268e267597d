"""What the runs say: a table for each task."""

from __future__ import annotations

from collections.abc import Sequence

from bench.fidelity.record import Record, Run
from bench.fidelity.rows import Row, mean, plain_runs, rows, spread
from bench.fidelity.subjects import subjects
from bench.fidelity.tasks import TASKS

__all__ = ["report"]

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
        found = rows(record, task)
        if not found:
            continue
        lines += ["", f"## {task}, {kind.steps} steps", ""]
        lines += [_of_plain(recipe, runs) for recipe, runs in plain_runs(record, task).items()]
        lines += ["", f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
        lines += [f"| {' | '.join(_cells(row))} |" for row in found]
        run = {row.subject.hook for row in found}
        if missing := [subject.label for subject in subjects() if subject.hook not in run]:
            lines += ["", f"Not run yet at the present defaults: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    subject = row.subject
    return [
        subject.label + (f" ({subject.recipe})" if subject.recipe else ""),
        str(len(row.runs)),
        f"{mean(run.loss for run in row.runs):.4f}",
        f"{row.change:+.1%}" if row.is_within else f"**{row.change:+.1%}**",
        ", ".join(f"{change:+.1%}" for change in row.changes),
        f"{subject.tolerance:.0%}",
        _accuracy(row.runs),
        f"{mean(run.wire_bytes for run in row.runs):,.0f}",
        f"{row.byte_share:.3f}",
    ]


def _of_plain(recipe: str, runs: Sequence[Run]) -> str:
    losses = [run.loss for run in runs]
    text = f"- Plain averaging, {recipe}: {mean(losses):.4f}, accuracy {_accuracy(runs)}; "
    if len(runs) == 1:
        return text + "one seed, so its spread is not known."
    return (
        f"{text}{len(runs)} seeds, from {min(losses):.4f} to {max(losses):.4f}, a spread of "
        f"{spread(runs):.1%}."
    )


def _accuracy(runs: Sequence[Run]) -> str:
    known = [run.accuracy for run in runs if run.accuracy is not None]
    return f"{mean(known):.3f}" if known else "-"
