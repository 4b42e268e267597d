"""Write the pages of results and their plots from the JSON files in bench/results.

``python -m bench.results_page`` writes the pages; with files as arguments it prints their tables.
Each kind of result has one function below, which turns its JSON into a section of
docs/results/tables.md. summary.py fills the figures that other pages quote into these pages.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import summary
from bench.auto import tables as auto_tables
from bench.fidelity.runs import Record, mean, spread
from bench.fidelity.tasks import ALL_TASKS
from bench.gpu import page as gpu_page
from bench.tables import groups, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"

Document = dict[str, Any]


# --------------------------------------------------------------------------- kinds of results


def _benchmarks(run: Document) -> Iterator[str]:
    """Render a run of ``make bench``: pytest-benchmark's JSON."""
    machine, cpu = run["machine_info"], run["machine_info"]["cpu"]
    yield (
        f"{cpu.get('brand_raw', 'unknown CPU')}, {cpu['count']} cores, Python "
        f"{machine['python_version']}, commit {run['commit_info'].get('id', 'unknown')[:12]}."
    )
    yield from groups(run["benchmarks"])


def _comparison(document: Document) -> Iterator[str]:
    """Render what ``commhooks compare --json`` writes."""
    yield f"{document['model']}, {document['world_size']} ranks."
    yield "\n".join(f"- {note}" for note in document.get("notes", ()))
    columns = ["hook", "step_seconds", "to_torch", "exposed_seconds", "floor_seconds"]
    columns += ["predicted_seconds", "wire_bytes", "ratio", "error", "peak_bytes"]
    columns += ["validation_loss"]
    by_link: dict[str, list[Document]] = {}
    for row in document["rows"]:
        by_link.setdefault(row["link"], []).append(row)
    for link, rows_of_link in by_link.items():
        how = "measured" if all(row["measured"] for row in rows_of_link) else "predicted"
        yield f"### {link}, {how}"
        cells = [{name: row.get(name) for name in columns} for row in rows_of_link]
        for row, of_row in zip(rows_of_link, cells, strict=True):
            if row["measured"] and (predicted := row.get("predicted_seconds")):
                of_row["predicted off by"] = f"{predicted / row['step_seconds'] - 1:+.0%}"
        yield table(cells)


def _trainings(document: Document) -> Iterator[str]:
    """Render the runs of ``python -m bench.fidelity`` at the present defaults."""
    record = Record(document)
    yield (
        f"{_machine(record.about)}. Loss on validation data, as the mean over seeds; *change* "
        "compares it with plain averaging on the same data, *allowed* is the limit that the "
        "project aims at."
    )
    for task, rows in record.rows.items():
        yield f"### {task}, {ALL_TASKS[task].steps} steps"
        for recipe, runs in record.plain_runs(task).items():
            losses = [run.loss for run in runs]
            yield (
                f"Plain averaging, {recipe}: {mean(losses):.4f}; seeds: {len(runs)}, from "
                f"{min(losses):.4f} to {max(losses):.4f}, a spread of {spread(runs):.1%}."
            )
        yield table(row.cells for row in rows)


def _auto(document: Document) -> Iterator[str]:
    """Render what ``python -m bench.auto`` writes: the hook ``auto`` beside other choices."""
    yield (
        f"{_machine(document['about'])}. *auto to it*: the time of a step with `auto`, trials and "
        "plans included, as a share of that with the setting; the median over turns, and its "
        "interval of 95 %. A uniform setting is a hook for the whole model whose error is at most "
        "that of `int4`."
    )
    points = document["points"]  # older files have them by name
    for entry in points.values() if isinstance(points, dict) else points:
        yield f"### {auto_tables.title(entry)}"
        yield auto_tables.circumstances(entry)
        yield table(auto_tables.point_rows(entry))


def _torch_hooks(document: Document) -> Iterator[str]:
    """Render what ``python -m bench.torch_hooks`` writes: torch's hooks over Gloo, and ours."""
    about = document["about"]
    yield (
        f"{_machine(about)}; load before and after {about['load']}. The loss is that after "
        f"{about['steps']} steps."
    )
    yield table(document["rows"])


def _machine(about: Document) -> str:
    ranks = f"{about['ranks']} ranks on " if "ranks" in about else ""
    known = {"Python": about.get("python"), "torch": about["torch"]}
    versions = "".join(f", {name} {version}" for name, version in known.items() if version)
    return f"{ranks}{about['cpu']}, {about['cores']} cores{versions}"


KINDS: dict[str, tuple[set[str], Callable[[Document], Iterator[str]]]] = {
    "pytest-benchmark": ({"benchmarks", "machine_info"}, _benchmarks),
    "bench.fidelity": ({"runs", "about"}, _trainings),
    "commhooks compare": ({"rows", "model", "world_size"}, _comparison),
    "bench.auto": ({"points"}, _auto),
    "bench.torch_hooks": ({"rows", "tried"}, _torch_hooks),
    "make gpu-check": ({"stages", "machine"}, gpu_page.sections),
}
"""The kinds of results: keys of the JSON object by which one is recognized, and its section."""


# -------------------------------------------------------------------------------- the page

_INTRODUCTION = """\
# Tables

Every file of `bench/results`, the newest first. [Results](../results.md) says in three minutes what
came out. `bench/README.md` explains the columns; `bench/results/README.md` compares the figures
with their aims, and says what was not reached and why. To measure yourself, use `make bench`,
or `commhooks compare` for your own model and link."""


def make_pages() -> dict[str, str]:
    """Make all pages from the stored results, by their path in the repository."""
    known = summary.facts(RESULTS)
    texts = {"docs/results/tables.md": make_tables()}
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        is_of_hook = path.parent == DOCS / "hooks"  # docs/generator/hook_pages.py makes these
        if "<!--=" in (text := path.read_text()) and not is_of_hook:
            texts[path.relative_to(ROOT).as_posix()] = summary.fill(text, known)
    return texts


def make_tables(results: Path = RESULTS) -> str:
    """Make the page of tables from all JSON files in ``results``.

    Raises:
        ValueError: a file is of none of the known kinds.
    """
    paths = sorted(results.glob("*.json"), reverse=True)
    parts = [_INTRODUCTION]
    for path in paths:
        section = section_of(path)
        title = path.stem[11:].replace("-", " ")
        parts += [f"## {title[:1].upper()}{title[1:]} ({path.stem[:10]})", *section]
    # A test compares it, so that no plot can be of older results than the page.
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    parts.append(f"<!-- Made by `make results`; do not edit. Digest of the results: {digest} -->")
    return "\n\n".join(filter(None, parts)) + "\n"


def section_of(path: Path) -> Iterator[str]:
    """Render one file of results; raise as :func:`make_tables`."""
    document = json.loads(path.read_text())
    for known, render in KINDS.values():
        if isinstance(document, dict) and known <= document.keys():
            return render(document)
    keys = sorted(document) if isinstance(document, dict) else type(document).__name__
    raise ValueError(
        f"{path}: expected results of {', '.join(KINDS)}; found {keys}. Add "
        "a kind for them to bench/results_page.py, or move the file"
    )


def main() -> None:
    """Write the pages and the plots, or print the tables of the files that are named."""
    if paths := sys.argv[1:]:
        for path in paths:
            print("\n\n".join(section_of(Path(path))))
        return
    for path, text in make_pages().items():
        (ROOT / path).write_text(text)
    for name, draw in summary.plots(RESULTS).items():
        draw(DOCS / "results" / name)


if __name__ == "__main__":
    main()
