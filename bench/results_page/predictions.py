"""Predictions of the simulation beside what was measured: ``python -m bench.predictions``."""

from __future__ import annotations

import statistics

from bench.results_page.kind import Document, Kind, Section, table
from bench.results_page.plots import bars
from commhooks.lab.units import format_rate

__all__ = ["PREDICTIONS"]


def _render(stem: str, document: Document) -> Section:
    cells = document["cells"]
    errors = [cell["predicted_seconds"] / cell["measured_seconds"] - 1 for cell in cells]
    sizes = sorted(map(abs, errors))
    about = (
        f"{document['machine']}. `{document['model']}`, buckets of {document['bucket_mb']:g} MiB; "
        f"seconds of `loss.backward()`. Error: median {statistics.median(sizes):.0%}, worst "
        f"{sizes[-1]:.0%}; of {len(sizes)} cells {sum(size <= 0.15 for size in sizes)} are within "
        f"15 % and {sum(size <= 0.30 for size in sizes)} within 30 %. In those with * other "
        "processes were at work, or may have been."
    )
    section = Section([about, ""])
    places = [f"{cell['ranks']} ranks, {format_rate(cell['bits_per_second'])}" for cell in cells]
    names = [f"{cell['hook']}, {place}" for cell, place in zip(cells, places, strict=True)]
    ratios = {name: 1 + error for name, error in zip(names, errors, strict=True)}
    section.add_plot(
        f"{stem}.svg",
        "predicted over measured seconds",
        bars("predictions", ratios, "predicted over measured seconds"),
    )
    rows = [
        [
            place,
            cell["hook"],
            f"{cell['measured_seconds']:.4f}{'' if cell['is_undisturbed'] else ' *'}",
            f"{cell['predicted_seconds']:.4f}",
            f"{error:+.0%}",
        ]
        for cell, place, error in zip(cells, places, errors, strict=True)
    ]
    section.lines += table(["where", "hook", "measured s", "predicted s", "error"], rows)
    return section


PREDICTIONS = Kind("bench.predictions", lambda document: "cells" in document, _render)
