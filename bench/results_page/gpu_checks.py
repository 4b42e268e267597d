"""Runs of ``make gpu-check``: how its stages ended, and what was measured."""

from __future__ import annotations

from bench.results_page.benchmarks import add_groups
from bench.results_page.kind import Document, Kind, Section, table

__all__ = ["GPU_CHECKS"]


def _render(stem: str, run: Document) -> Section:
    machine = run["machine"]
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items() if found)
    where = (
        f"{'; '.join(machine['devices'])}. Driver {machine['driver']}, CUDA {machine['cuda']}, "
        f"NCCL {machine['nccl']}, {machine['nvcc']}, Python {machine['python']}, {versions}, "
        f"commit {machine['commit']}."
    )
    rows = [
        [stage["name"], stage["status"], f"{stage['seconds']:.0f}", _last_line(stage["tail"])]
        for stage in run["stages"]
    ]
    section = Section([where, "", *table(["stage", "ended", "seconds", "last line"], rows)])
    add_groups(section, stem, run["benchmarks"])
    return section


def _last_line(text: str) -> str:
    last = (text.strip().splitlines() or [""])[-1]
    return last.strip("= ").replace("|", "/")


GPU_CHECKS = Kind(
    "make gpu-check", lambda document: {"stages", "machine"} <= document.keys(), _render
)
