"""Write the pages of results and their plots from the JSON files in bench/results.

``python -m bench.results_page`` writes the pages; with files as arguments it prints their tables.
Each kind of result has one function below, which turns its JSON into a :class:`Section` of
docs/results/tables.md. summary.py answers questions from the same files in docs/results.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from bench import summary
from bench.auto import tables as auto_tables
from bench.fidelity.record import Record
from bench.fidelity.rows import mean, measured_tasks, plain_runs, rows, spread
from bench.fidelity.tasks import TASKS
from bench.figures import pareto_front
from bench.plots import Draw
from bench.slow_link.hooks import PLAIN
from bench.slow_link.record import courses_of
from commhooks.lab.units import format_rate

__all__ = [
    "KINDS",
    "Pages",
    "Section",
    "UnknownResultError",
    "make_tables",
    "quantity",
    "section_of",
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"

Document = dict[str, Any]


class UnknownResultError(ValueError):
    """A file of results is of none of the known kinds."""


@dataclass
class Section:
    """The part of the page that shows one file of results."""

    parts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add a paragraph in Markdown."""
        self.parts.append(text)

    def add_table(self, frame: pd.DataFrame) -> None:
        """Add a table. Numbers get the unit that the name of their column implies."""
        cells = frame.apply(lambda column: column.map(lambda value: quantity(column.name, value)))
        cells.columns = [str(name).replace("_", " ") for name in cells.columns]
        self.parts.append(cells.to_markdown(index=False, disable_numparse=True, tablefmt="github"))

    @property
    def tables(self) -> str:
        """The section in Markdown."""
        return "\n\n".join(self.parts) + "\n"


# --------------------------------------------------------------------------- kinds of results


def _benchmarks(run: Document) -> Section:
    """Render a run of ``make bench``: pytest-benchmark's JSON."""
    machine, cpu = run["machine_info"], run["machine_info"]["cpu"]
    section = Section()
    section.add(
        f"{cpu.get('brand_raw', 'unknown CPU')}, {cpu['count']} cores, Python "
        f"{machine['python_version']}, commit {run['commit_info'].get('id', 'unknown')[:12]}."
    )
    _add_groups(section, run["benchmarks"])
    return section


def _add_groups(section: Section, benchmarks: list[Document]) -> None:
    rows = [
        {"group": row["group"] or row["fullname"], "case": _case(row["name"]), **row["extra_info"]}
        for row in benchmarks
    ]
    if not rows:
        return
    for group, frame in pd.DataFrame(rows).groupby("group", sort=False):
        frame = frame.dropna(axis="columns", how="all").drop(columns="group")
        section.add(f"### {group}")
        if "aim" in frame:
            aims = sorted(map(str, frame.pop("aim").dropna().unique()))
            section.add(f"Aim: {'; '.join(aims)}.")
        section.add_table(frame)


def _case(name: str) -> str:
    return name.partition("[")[2].removesuffix("]") or name


def _comparison(document: Document) -> Section:
    """Render what ``commhooks compare --json`` writes."""
    notes = "\n".join(f"- {note}" for note in document.get("notes", ()))
    section = Section()
    section.add(f"{document['model']}, {document['world_size']} ranks.")
    section.add(notes)
    columns = [
        "hook",
        "step_seconds",
        "to_torch",
        "exposed_seconds",
        "floor_seconds",
        "wire_bytes",
        "ratio",
        "error",
        "peak_bytes",
        "validation_loss",
    ]
    for link, frame in pd.DataFrame(document["rows"]).groupby("link", sort=False):
        how = "measured" if frame["measured"].all() else "predicted"
        section.add(f"### {link}, {how}")
        known = frame.reindex(columns=columns).dropna(axis="columns", how="all")
        section.add_table(known)
    return section


def _predictions(document: Document) -> Section:
    """Render what ``python -m bench.predictions`` writes: predictions beside measurements."""
    frame = pd.DataFrame(document["cells"])
    frame["link"] = frame["bits_per_second"].map(format_rate)
    frame["error"] = frame["predicted_seconds"] / frame["measured_seconds"] - 1
    sizes = frame["error"].abs()
    section = Section()
    section.add(
        f"{document['machine']}. `{document['model']}`, buckets of {document['bucket_mb']:g} "
        f"MiB; time of `loss.backward()`. Error: median {sizes.median():.0%}, worst "
        f"{sizes.max():.0%}; of {len(sizes)} cells {(sizes <= 0.15).sum()} are within 15 % and "
        f"{(sizes <= 0.30).sum()} within 30 %. Cells that are not *undisturbed* were measured "
        "while other processes ran, or may have been."
    )
    frame["error"] = frame["error"].map("{:+.0%}".format)
    frame = frame.rename(columns={"is_undisturbed": "undisturbed"})
    columns = [
        "ranks",
        "link",
        "hook",
        "measured_seconds",
        "predicted_seconds",
        "error",
        "undisturbed",
    ]
    section.add_table(frame[columns])
    return section


def _slow_link(document: Document) -> Section:
    """Render what ``python -m bench.slow_link`` writes: trainings over a slow link."""
    about, courses = document["about"], courses_of(document)
    plain = courses[PLAIN].lowest
    rows = []
    for course in courses.values():
        last, arrival = course.points[-1], course.first_at(plain.validation_loss)
        sent = last.wire_bytes / last.step
        rows.append(
            {
                "hook": course.hook,
                "step_seconds": last.seconds / last.step,
                "bytes_per_step": sent,
                "seconds_at_the_rate": 8 * sent / about["bits_per_second"],
                "reaches_plain_after": arrival and f"{arrival.seconds:.1f} s, {arrival.step} steps",
                "share_of_plain_time": arrival and arrival.seconds / plain.seconds,
                "last_step": last.step,
                "last_loss": last.validation_loss,
                "bare_step_seconds": dict(
                    zip(("before", "after"), course.bare_step_seconds, strict=True)
                ),
            }
        )
    frame = pd.DataFrame(rows)
    frame["share_of_plain_time"] = frame["share_of_plain_time"].astype(float)
    frame = frame.sort_values(["share_of_plain_time", "last_loss"])  # the fastest first
    bare = [seconds for course in courses.values() for seconds in course.bare_step_seconds]
    section = Section()
    section.add(
        f"{about['parameters'] / 1e6:.1f} million parameters, {about['ranks']} ranks on "
        f"{about['cpu']}, {about['cores']} cores, {format_rate(about['bits_per_second'])}, "
        f"torch {about['torch']}. Plain averaging reached its lowest validation loss, "
        f"{plain.validation_loss:.4f}, after {plain.step} steps and {plain.seconds:.0f} s. A "
        "hook without a time was stopped before it got there. A training step of each rank "
        f"alone took {quantity('seconds', min(bare))} to {quantity('seconds', max(bare))}, "
        f"median {quantity('seconds', statistics.median(bare))}, before and after the "
        "trainings."
    )
    section.add_table(frame)
    return section


def _trainings(document: Document) -> Section:
    """Render the runs of ``python -m bench.fidelity`` at the present defaults."""
    about, record = document["about"], Record(document)
    section = Section()
    section.add(
        f"{about['ranks']} ranks, {about['cpu']}, {about['cores']} cores, Python "
        f"{about['python']}, torch {about['torch']}. Loss on validation data, as the mean over "
        "seeds; *change* compares it with plain averaging on the same data, *allowed* is the limit "
        "that the project aims at. `python -m bench.fidelity` continues this file."
    )
    for task in measured_tasks(record):
        section.add(f"### {task}, {TASKS[task].steps} steps")
        for recipe, runs in plain_runs(record, task).items():
            losses = [run.loss for run in runs]
            section.add(
                f"Plain averaging, {recipe}: {mean(losses):.4f}; {len(runs)} seeds from "
                f"{min(losses):.4f} to {max(losses):.4f}, a spread of {spread(runs):.1%}."
                if len(runs) > 1
                else f"Plain averaging, {recipe}: {mean(losses):.4f}, one seed."
            )
        found = rows(record, task)
        front = pareto_front([(row.byte_share, row.change_to_usual) for row in found])
        frame = pd.DataFrame(
            {
                "hook": row.trained.label + f" ({row.trained.recipe})" * bool(row.trained.recipe),
                "loss": f"{mean(run.loss for run in row.runs):.4f}",
                "change": f"{row.change:+.1%}",
                "change by seed": ", ".join(f"{change:+.1%}" for change in row.changes),
                "front": "yes" * ((row.byte_share, row.change_to_usual) in front),
                "allowed": f"{row.trained.tolerance:.0%}",
                "accuracy": mean(run.accuracy or math.nan for run in row.runs),
                "wire_bytes": mean(run.wire_bytes for run in row.runs),
                "share of plain": row.byte_share,
            }
            for row in found
        ).dropna(axis="columns", how="all")
        section.add_table(frame)
    return section


def _auto(document: Document) -> Section:
    """Render what ``python -m bench.auto`` writes: the hook ``auto`` beside other choices."""
    about = document["about"]
    section = Section()
    section.add(
        f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, torch "
        f"{about['torch']}. *auto to it*: the time of a step with `auto`, trials and plans "
        "included, as a share of that with the setting; the median over turns, and its interval "
        "of 95 %. A uniform setting is a hook for the whole model whose error is at most that of "
        "`int4`."
    )
    for entry in document["points"].values():
        section.add(f"### {auto_tables.title(entry)}")
        section.add(auto_tables.circumstances(entry))
        section.add_table(pd.DataFrame(auto_tables.point_rows(entry)))
    for model, entry in document["rate_changes"].items():
        section.add(f"### {model}, while the rate of the link changes")
        section.add_table(pd.DataFrame(auto_tables.change_rows(entry)))
    return section


def _gpu_check(run: Document) -> Section:
    """Render a run of ``make gpu-check``: how its stages ended, and what they measured."""
    machine = run["machine"]
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items() if found)
    section = Section()
    section.add(
        f"{'; '.join(machine['devices'])}. Driver {machine['driver']}, CUDA {machine['cuda']}, "
        f"NCCL {machine['nccl']}, {machine['nvcc']}, Python {machine['python']}, {versions}, "
        f"commit {machine['commit']}."
    )
    stages = pd.DataFrame(run["stages"]).rename(columns={"name": "stage", "status": "ended"})
    stages["last line"] = stages.pop("tail").map(
        lambda tail: (tail.strip().splitlines() or [""])[-1].strip("= ")
    )
    section.add_table(stages)
    _add_groups(section, run["benchmarks"])
    return section


@dataclass(frozen=True)
class Kind:
    """A kind of result. ``recognizes``: by the keys of the JSON object."""

    name: str
    recognizes: Callable[[set[str]], bool]
    render: Callable[[Document], Section]


KINDS = [
    Kind("pytest-benchmark", lambda keys: {"benchmarks", "machine_info"} <= keys, _benchmarks),
    Kind(
        "bench.fidelity", lambda keys: "runs" in keys and bool({"task", "about"} & keys), _trainings
    ),
    Kind("commhooks compare", lambda keys: {"rows", "model", "world_size"} <= keys, _comparison),
    Kind("bench.predictions", lambda keys: "cells" in keys, _predictions),
    Kind("bench.auto", lambda keys: {"points", "rate_changes"} <= keys, _auto),
    Kind("bench.slow_link", lambda keys: "courses" in keys, _slow_link),
    Kind("make gpu-check", lambda keys: {"stages", "machine"} <= keys, _gpu_check),
]


# -------------------------------------------------------------------------------- the page

_INTRODUCTION = """\
# Tables

Every file of `bench/results`, the newest first. [Results](../results.md) says in three minutes what
came out. `bench/README.md` explains the columns; `bench/results/README.md` compares the figures
with their aims, and says what was not reached and why. To measure yourself, use `make bench`,
or `commhooks compare` for your own model and link."""


@dataclass(frozen=True)
class Pages:
    """The pages by their path in docs, and the plots by file name in docs/results."""

    texts: dict[str, str]
    plots: dict[str, Draw]


def make_pages() -> Pages:
    """Make all pages from the stored results."""
    texts = {"results.md": summary.page(RESULTS), "results/tables.md": make_tables()}
    return Pages(texts, summary.plots(RESULTS))


def make_tables(results: Path = RESULTS) -> str:
    """Make the page of tables from all JSON files in ``results``.

    Raises:
        UnknownResultError: a file is of none of the known kinds.
    """
    paths = sorted(results.glob("*.json"), reverse=True)
    parts = [_INTRODUCTION]
    for path in paths:
        section = section_of(path)
        title = path.stem[11:].replace("-", " ")
        parts += [f"## {title[:1].upper()}{title[1:]} ({path.stem[:10]})", *section.parts]
    # A test compares it, so that no plot can be of older results than the page.
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    parts.append(f"<!-- Made by `make results`; do not edit. Digest of the results: {digest} -->")
    return "\n\n".join(filter(None, parts)) + "\n"


def section_of(path: Path) -> Section:
    """Render one file of results; raise as :func:`make_tables`."""
    document = json.loads(path.read_text())
    for kind in KINDS:
        if isinstance(document, dict) and kind.recognizes(set(document)):
            return kind.render(document)
    keys = sorted(document) if isinstance(document, dict) else type(document).__name__
    raise UnknownResultError(
        f"{path}: expected results of {', '.join(kind.name for kind in KINDS)}; found {keys}. Add "
        "a Kind for them to bench/results_page.py, or move the file"
    )


_UNITS = {
    "milliseconds": (1.0, "ms"),
    "seconds": (1e3, "ms"),
    "bytes": (1e-6, "MB"),
    "bandwidth": (1e-9, "GB/s"),
}


def quantity(column: str, value: Any) -> str:
    """Format a value of a column, in the unit that the name of the column implies."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {quantity(column, item)}" for key, item in value.items())
    if value is None or pd.isna(value):
        return ""
    if isinstance(value, bool | str):
        return str(value).replace("|", "\\|")
    for name, (scale, unit) in _UNITS.items():
        if name in column:
            scaled = value * scale
            return f"{scaled:.3g} {unit}" if scaled < 1000 else f"{scaled:,.0f} {unit}"
    return f"{value:.4g}"


def _write(pages: Pages) -> None:
    """Write the pages and the plots, and remove the plots of results that are gone."""
    folder = DOCS / "results"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.name not in pages.plots:
            old.unlink()
    for name, draw in pages.plots.items():
        draw(folder / name)
    for path, text in pages.texts.items():
        (DOCS / path).write_text(text)


def main() -> None:
    """Write the pages, or print the tables of the files that are named."""
    try:
        if len(sys.argv) == 1:
            _write(make_pages())
        for path in sys.argv[1:]:
            print(section_of(Path(path)).tables)
    except UnknownResultError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
