"""The page: a section for each file of results, newest first."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from bench.results_page.benchmarks import BENCHMARKS
from bench.results_page.comparisons import COMPARISONS
from bench.results_page.gpu_checks import GPU_CHECKS
from bench.results_page.kind import Draw, Kind, Section
from bench.results_page.predictions import PREDICTIONS
from bench.results_page.slow_links import SLOW_LINKS
from bench.results_page.trainings import TRAININGS

__all__ = ["KINDS", "Page", "UnknownResultError", "make_page", "section_of", "write_page"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
TARGET = ROOT / "docs" / "results.md"

KINDS: list[Kind] = [BENCHMARKS, TRAININGS, COMPARISONS, PREDICTIONS, SLOW_LINKS, GPU_CHECKS]

_INTRODUCTION = """\
# Results

What has been measured, with nothing left out: every file of `bench/results`, newest first. What the
columns mean stands in `bench/README.md`; what was aimed at, and what was not reached and why, in
`bench/results/README.md`. To measure yourself: `make bench`; for your own model and link:
`commhooks compare`.
"""


class UnknownResultError(ValueError):
    """A file of results that no kind recognizes."""


@dataclass(frozen=True)
class Page:
    """``plots``: by file name in docs/results."""

    text: str
    plots: dict[str, Draw]


def make_page(results: Path = RESULTS) -> Page:
    """Reads all results.

    Raises UnknownResultError for a file that is of none of the known kinds.
    """
    sections = {path: section_of(path) for path in sorted(results.glob("*.json"), reverse=True)}
    lines = [_INTRODUCTION]
    plots: dict[str, Draw] = {}
    for path, section in sections.items():
        lines += [f"## {_title(path.stem)}", "", *section.lines]
        plots |= section.plots
    # So that plots are known to be of these very files.
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sections)).hexdigest()
    lines += [f"<!-- Made by `make results`; do not edit. Of results with digest {digest}. -->", ""]
    return Page("\n".join(lines), plots)


def write_page() -> None:
    """Writes the page and its plots; plots of results that are gone go too."""
    page = make_page()
    folder = TARGET.with_suffix("")
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.name not in page.plots:
            old.unlink()
    for name, draw in page.plots.items():
        draw(folder / name)
    TARGET.write_text(page.text)


def section_of(path: Path) -> Section:
    """Of one file of results; errors as of :func:`make_page`."""
    document = json.loads(path.read_text())
    for kind in KINDS:
        if isinstance(document, dict) and kind.recognizes(document):
            return kind.render(path.stem, document)
    keys = sorted(document) if isinstance(document, dict) else type(document).__name__
    raise UnknownResultError(
        f"{path}: expected results of {', '.join(kind.name for kind in KINDS)}; found {keys}. Add "
        "a Kind for them to bench/results_page, or move the file"
    )


def _title(stem: str) -> str:
    date, rest = stem[:10], stem[11:].replace("-", " ")
    return f"{rest[:1].upper()}{rest[1:]} ({date})"
