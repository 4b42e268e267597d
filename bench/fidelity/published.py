"""The figures that the package and the docs show: one per hook and task."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import TypeAlias

import commhooks
from bench.fidelity.record import Record
from bench.fidelity.rows import Row, plain_runs, rows, spread
from bench.fidelity.tasks import TASKS

__all__ = ["DOCS", "PACKAGED", "figures", "publish", "with_tables"]

PACKAGED = Path(commhooks.__file__).parent / "hook" / "fidelity.json"
DOCS = Path(__file__).parents[2] / "docs" / "hooks"
Figures: TypeAlias = dict[str, dict[str, float | int]]

_TABLE = re.compile(
    r"(?<=<!-- fidelity: )(?P<hooks>[\w ]+)(?P<end> -->\n).*?(?=<!-- end of fidelity -->)", re.S
)


def publish(record: Record) -> None:
    """Write ``commhooks/hook/fidelity.json`` and the tables of ``docs/hooks/``."""
    PACKAGED.write_text(json.dumps(figures(record), indent=1) + "\n")
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(with_tables(record, page.read_text()))


def figures(record: Record) -> Figures:
    """Return the change of the validation loss in percent, by hook and task.

    Only hooks that were run on all tasks. ``seeds``: the number of seeds, of the task with the
    fewest.
    """
    by_hook = _by_hook(record)
    return {
        hook: {task: round(100 * row.change, 1) for task, row in found.items()}
        | {"seeds": min(len(row.runs) for row in found.values())}
        for hook, found in sorted(by_hook.items())
        if found.keys() == TASKS.keys()
    }


def with_tables(record: Record, text: str) -> str:
    """Return the page with a new table after each ``<!-- fidelity: HOOK ... -->``."""
    by_hook = _by_hook(record)

    def made(match: re.Match[str]) -> str:
        found = {hook: by_hook.get(hook, {}) for hook in match["hooks"].split()}
        return f"{match['hooks']}{match['end']}{_introduction(record)}\n{_table(found)}\n"

    return _TABLE.sub(made, text)


def _by_hook(record: Record) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for task in TASKS:
        for row in rows(record, task):
            found.setdefault(row.trained.hook, {})[task] = row
    return found


def _introduction(record: Record) -> str:
    tasks = " ".join(f"*{task}*: {kind.summary}." for task, kind in TASKS.items())
    text = (
        "Change of the validation loss against plain averaging on the same data, on "
        f"{record.about['ranks']} ranks, at the hook's default options and plain averaging's "
        f"learning rate; in parentheses the number of seeds. {tasks}{_of_plain(record)} **Bold**: "
        "more than 2 %, or 5 % for one bit and for 1 % of the numbers. How the figures came about, "
        "and those of each seed: `bench/README.md`, `bench/results/`."
    )
    return textwrap.fill(text, 108, break_long_words=False, break_on_hyphens=False) + "\n"


def _of_plain(record: Record) -> str:
    """Say how much seeds differ."""
    known = {task: next(iter(plain_runs(record, task).values()), []) for task in TASKS}
    spreads = [f"{100 * spread(runs):.1f} % ({task})" for task, runs in known.items() if runs[1:]]
    if not spreads:
        return ""
    return f" Under plain averaging the seeds are up to {' and '.join(spreads)} apart."


def _table(found: dict[str, dict[str, Row]]) -> str:
    columns = ["hook", *TASKS, "share of plain averaging's bytes"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for hook, by_task in found.items():
        label = next((row.trained.description for row in by_task.values()), f"`{hook}`")
        changes = [_change(by_task.get(task)) for task in TASKS]
        lines.append(f"| {label} | {' | '.join(changes)} | {_bytes(by_task)} |")
    return "\n".join(lines) + "\n"


def _change(row: Row | None) -> str:
    if row is None:
        return "not measured"
    text = f"{100 * row.change:+.1f} %".replace("-", "\N{MINUS SIGN}")
    return f"{text if row.is_within else f'**{text}**'} ({len(row.runs)})"


def _bytes(by_task: dict[str, Row]) -> str:
    return ", ".join(f"{100 * row.byte_share:.0f} %" for row in by_task.values()) or "-"
