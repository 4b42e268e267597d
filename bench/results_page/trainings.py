"""Does it still learn: the runs of bench.fidelity, in its first form and today's."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.results_page.kind import Document, Kind, Section, table
from bench.results_page.plots import bars

__all__ = ["TRAININGS"]

PLAIN = "allreduce"


@dataclass(frozen=True)
class Outcome:
    """Of the runs of one hook: means over seeds."""

    task: str
    hook: str
    recipe: str
    loss: float
    spread: float
    wire_bytes: float


def _render(stem: str, document: Document) -> Section:
    about = document.get("about", document)
    known = [f"{about['ranks']} ranks"]
    known += [f"{about['steps']} steps"] if "steps" in about else []
    known += [f"torch {about['torch']}"]
    seeds = {run["seed"] for run in document["runs"]}
    section = Section([f"{', '.join(known)}, {len(seeds)} seeds; loss on validation data.", ""])
    outcomes = list(_outcomes(document))
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        _add_task(section, stem, task, [outcome for outcome in outcomes if outcome.task == task])
    return section


def _add_task(section: Section, stem: str, task: str, outcomes: list[Outcome]) -> None:
    section.lines += [f"### {task}", ""]
    ratios = {_label(o, outcomes): o.loss / _plain(o, outcomes).loss for o in outcomes}
    section.add_plot(
        f"{stem}-{task}.svg",
        f"{task}: validation loss of each hook over that of plain averaging",
        bars(f"{task}: validation loss", ratios, "over that of plain averaging", log=True),
    )
    rows = [
        [
            _label(outcome, outcomes),
            f"{outcome.loss:.4f}",
            f"{outcome.spread:.4f}",
            f"{outcome.loss / _plain(outcome, outcomes).loss - 1:+.1%}",
            f"{outcome.wire_bytes / 1e6:.2f} MB",
            f"{outcome.wire_bytes / _plain(outcome, outcomes).wire_bytes:.4f}",
        ]
        for outcome in outcomes
    ]
    header = ["hook", "loss", "spread over seeds", "to plain", "sent by a rank", "to plain"]
    section.lines += table(header, rows)


def _label(outcome: Outcome, outcomes: list[Outcome]) -> str:
    several = len({o.recipe for o in outcomes if o.hook == outcome.hook}) > 1
    is_special = outcome.recipe != _plain(outcome, outcomes).recipe
    return f"{outcome.hook} ({outcome.recipe})" if several or is_special else outcome.hook


def _plain(outcome: Outcome, outcomes: list[Outcome]) -> Outcome:
    """Plain averaging, with the same recipe if there is such a run."""
    plain = [other for other in outcomes if other.hook == PLAIN]
    return next((other for other in plain if other.recipe == outcome.recipe), plain[0])


def _outcomes(document: Document) -> Iterable[Outcome]:
    """Plain averaging first."""
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in document["runs"]:
        key = (run.get("task") or document["task"], run["hook"], run.get("recipe", ""))
        runs.setdefault(key, []).append(run)
    for key in sorted(runs, key=lambda key: (key[0], key[1] != PLAIN, key)):
        by_seed: dict[int, list[float]] = {}
        for run in runs[key]:
            by_seed.setdefault(run["seed"], []).append(run["loss"])
        losses = [statistics.fmean(values) for values in by_seed.values()]
        sent = statistics.fmean(run["wire_bytes"] for run in runs[key])
        yield Outcome(*key, statistics.fmean(losses), max(losses) - min(losses), sent)


TRAININGS = Kind(
    "bench.fidelity",
    lambda document: "runs" in document and {"task", "about"} & document.keys() != set(),
    _render,
)
