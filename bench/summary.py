"""The figures that pages quote, computed from the files in bench/results, and the plots.

A page has a figure between two marks, ``<!--=name-->6.5<!--=-->``, which readers do not see; a
table or a paragraph has its marks on lines of their own. ``make results`` fills them in, and a test
compares the pages with the files. The newest file of each kind counts.
"""

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import figures, language, tables
from bench.fidelity.runs import Record, Row, mean
from bench.fidelity.tasks import TASKS
from bench.fidelity.trained_hooks import REFERENCE
from bench.figures import short
from bench.files import load, newest
from bench.gpu import page as gpu_page

_MARKED = re.compile(r"<!--=(?P<name>[^>]+)-->(?P<old>.*?)<!--=-->", re.DOTALL)
_LIMIT = 0.02
"""The change of the loss that counts as a loss."""

Document = Mapping[str, Any]


def fill(text: str, known: Mapping[str, str]) -> str:
    """Return a page with the present figures between its marks.

    Raises:
        LookupError: a mark has an unknown name.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in known:
            raise LookupError(
                f"expected a figure that bench/summary.py computes; found {name!r}. Known are: "
                f"{', '.join(sorted(known))}"
            )
        new = f"\n\n{known[name]}\n\n" if "\n" in match["old"] else known[name]
        return f"<!--={name}-->{new}<!--=-->"

    return _MARKED.sub(replace, text)


def plots(results: Path) -> dict[str, Callable[[Path], None]]:
    """Return the functions that draw the plots to a path, by file name."""
    kernels = newest(results, "*-kernels.json")["benchmarks"]
    return {
        "fidelity.svg": partial(figures.fidelity, Record(newest(results, "*-fidelity.json")).rows),
        "slow-link.svg": partial(figures.language, language.Courses(results)),
        "scaling.svg": partial(figures.scaling, cells(results)),
        "kernels.svg": partial(figures.kernels, kernels),
    }


def facts(results: Path) -> dict[str, str]:
    """Return all figures by name."""
    record = Record(newest(results, "*-fidelity.json"))
    gpu_runs = (load(path) for path in sorted(results.glob("*.json"), reverse=True))
    return {
        **_fidelity(record),
        **language.facts(language.Courses(results), _worst(record)),
        **_links(cells(results)),
        **_kernels(newest(results, "*-kernels.json")["benchmarks"]),
        **_averaging(newest(results, "*-2-cores-averaging.json")["benchmarks"]),
        **_averaging(newest(results, "*-averaging-4-ranks.json")["benchmarks"]),
        **_comparison(newest(results, "*-compare-1gbit.json")["rows"]),
        **_torch_hooks(newest(results, "*-torch-hooks.json")),
        "gpu links": _gpu_links(sorted(results.glob("*-shared-links.json"))),
        **gpu_page.facts(next(run for run in gpu_runs if gpu_page.has_aims(run))),
    }


def table(rows: Iterable[Document]) -> str:
    return tables.table(rows, aligned=False)


# ------------------------------------------------------------------------------------- fidelity


def _fidelity(record: Record) -> dict[str, str]:
    worst = _worst(record)
    shares = {
        hook: max(row.byte_share for row in found.values())
        for hook, found in record.by_hook.items()
    }
    within = [hook for hook, change in worst.items() if change <= _LIMIT]
    least = min(within, key=shares.__getitem__)
    seeds = {len(row.runs) for found in record.by_hook.values() for row in found.values()}
    gpt = record.rows["gpt"]
    points = {(row.byte_share, row.change_to_usual): row for row in gpt}
    of_diloco = [row for row in gpt if row.trained.hook in ("diloco", REFERENCE)]
    beyond = [hook for hook in sorted(worst, key=worst.__getitem__) if hook not in within]
    return {
        "hooks": str(len(worst)),
        "within": str(len(within)),
        "least": f"`{least}`",
        "least share": f"{100 * shares[least]:.0f} %",
        "beyond": textwrap.fill(", ".join(f"`{hook}`" for hook in beyond), 118),
        "spread": f"{100 * mean(record.spreads.values()):.0f} %",
        "seeds": f"{min(seeds)} to {max(seeds)}",
        "front": _trainings(points[point] for point in figures.pareto_front(points)),
        "one worker": _trainings(row for row in of_diloco if "period" not in row.trained.spec),
        **{f"loss {row.trained.title}": language.percent(row.change_to_usual) for row in gpt},
        **{
            f"alone {row.trained.title}": language.percent(row.control_change)
            for row in gpt
            if row.control_change is not None
        },
    }


def _worst(record: Record) -> dict[str, float]:
    """Return the change of the loss on the task that suffers most, by hook."""
    return {hook: max(row.change for row in of.values()) for hook, of in record.by_hook.items()}


def _trainings(found: Iterable[Row]) -> str:
    return table(
        {
            "training": row.trained.label,
            "optimizer": row.trained.recipe or TASKS["gpt"].usual,
            "bytes": _one_in(row.byte_share),
            "loss against plain averaging with AdamW": language.percent(row.change_to_usual),
            "by seed": ", ".join(map(language.percent, row.changes_to_usual)),
            "one rank alone": ""
            if (alone := row.control_change) is None
            else language.percent(alone),
        }
        for row in found
    )


def _one_in(share: float) -> str:
    return f"1/{1 / share:,.{0 if share < 0.01 else 1}f}" if share else "none"


# --------------------------------------------------------------------------------- single steps


def cells(results: Path) -> list[dict[str, Any]]:
    """Return the newest steps over links that are measured and predicted, with their ``ranks``.

    They are rows of all files of ``commhooks compare`` of the newest date whose names contain
    "links", one per number of ranks.
    """
    date = max(results.glob("*-links-*.json")).name[:10]
    return [
        row | {"ranks": document["world_size"]}
        for document in map(load, sorted(results.glob(f"{date}-*-links-*.json")))
        for row in document["rows"]
        if row["measured"] and row["predicted_seconds"] and row["hook"] not in ("bare", "torch")
    ]


def _links(found: Sequence[Document]) -> dict[str, str]:
    """Return the number of cells, and how far predictions are off."""
    errors = [abs(cell["predicted_seconds"] / cell["step_seconds"] - 1) for cell in found]
    return {
        "cells": str(len(found)),
        "median error": f"{100 * statistics.median(errors):.0f} %",
        "worst error": f"{100 * max(errors):.0f} %",
    }


def _kernels(benchmarks: Sequence[Document]) -> dict[str, str]:
    shares = [
        row["extra_info"]["share_of_copy"]
        for row in benchmarks
        if row["name"].startswith(("test_encode", "test_decode"))
    ]
    return {
        "codecs": f"{min(shares):.2f} to {max(shares):.2f}",
        "codecs in the median": f"{statistics.median(shares):.2f}",
    }


_AVERAGED = {
    "test_averaging[Transformer-": "large",
    "test_averaging[ManySmall-": "small",
    "test_four_ranks[": "of four",
}


def _averaging(benchmarks: Iterable[Document]) -> dict[str, str]:
    """Return the spans of shares of torch's step over both gradient modes."""
    ratios: dict[str, list[float]] = {}
    for row in benchmarks:
        size = next(size for start, size in _AVERAGED.items() if row["name"].startswith(start))
        hook, *way = row["extra_info"]["hook"].split(", ")
        if hook == REFERENCE:
            name = ", ".join([f"averaging {size}", *way])
            ratios.setdefault(name, []).append(row["extra_info"]["ratio_to_torch"])
    spans = {name: (f"{min(found):.2f}", f"{max(found):.2f}") for name, found in ratios.items()}
    return {name: " to ".join(dict.fromkeys(span)) for name, span in spans.items()}


def _comparison(measured: Sequence[Document]) -> dict[str, str]:
    seconds: dict[str, dict[str, float]] = {}
    for row in measured:
        seconds.setdefault(row["hook"], {})[row["link"]] = row["step_seconds"]
    hooks = [hook for hook in seconds if hook not in ("bare", "torch")]
    shares = {
        hook: {
            f"{link}: to {shown}": f"{seconds[hook][link] / seconds[other][link]:.2f}"
            for link in ("loopback", "1 Gbit/s")
            for other, shown in (("torch", "torch's"), ("bf16", "`bf16`"))
        }
        for hook in hooks
    }
    compressing = [hook for hook in hooks if hook not in (REFERENCE, "bf16")]
    slower = [h for h in compressing if seconds[h]["loopback"] > seconds["torch"]["loopback"]]
    peaks = {row["hook"]: f"{row['peak_bytes'] / 1e9:.2f} GB" for row in measured}
    return {
        "single step": table({"hook": f"`{short(hook)}`"} | shares[hook] for hook in hooks),
        "slower": str(len(slower)),
        "compressing": str(len(compressing)),
        "loopback int8 to bf16": shares["int8"]["loopback: to `bf16`"],
        **{f"memory {short(hook)}": peak for hook, peak in peaks.items()},
    }


def _gpu_links(paths: Sequence[Path]) -> str:
    if not paths:
        return "Not yet measured."
    rows = [row for row in load(paths[-1])["rows"] if row["hook"] != "bare"]
    return table(
        {
            "link": row["link"],
            "hook": f"`{short(row['hook'])}`",
            "step": tables.quantity("seconds", row["step_seconds"]),
            "exposed": tables.quantity("seconds", row["exposed_seconds"]),
            "memory": f"{row['peak_bytes'] / 1e9:.2f} GB",
            "sent": f"{row['wire_bytes'] / 1e6:.1f} MB" if row["wire_bytes"] else "not known",
        }
        for row in rows
    )


def _torch_hooks(document: Document) -> dict[str, str]:
    measured = {row["hook"]: row for row in document["rows"]}
    unit = measured["allreduce_hook"]["step_seconds"]
    rows, trials = [], []
    for theirs, by_count in document["tried"].items():
        ours = theirs.removesuffix("_hook").removesuffix("_compress").lower()
        if ours in measured:
            row = {"here": f"`{ours}`", "torch": f"`{theirs}`"}
            pair = {"here": measured[ours], "there": measured.get(theirs)}
            for where, of in pair.items():
                row[f"step {where}"] = f"{of['step_seconds'] / unit:.2f}" if of else "fails"
            for where, of in pair.items():
                row[f"loss {where}"] = f"{of['validation_loss']:.3f}" if of else "fails"
            rows.append(row)
        several, one = (
            "; ".join(f"{n}: {how}" for how, n in found.items()) for found in by_count.values()
        )
        one = "the same" if several == one else one
        trials.append({"hook": f"`{theirs}`", "several buckets": several, "one bucket": one})
    return {"torch hooks": table(rows), "torch hooks tried": table(trials)}
