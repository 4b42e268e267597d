"""The figures that pages quote, computed from the files in bench/results, and the plots.

A page has a figure between two marks, ``<!--=name-->6.5<!--=-->``, which readers do not see; a
table or a paragraph has its marks on lines of their own. ``make results`` fills them in, and a test
compares the pages with the files. The newest file of each kind counts.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import figures
from bench.fidelity.runs import Record, Row, by_hook, mean, measured_tasks, plain_runs, rows, spread
from bench.fidelity.tasks import TASKS
from bench.figures import short
from bench.gpu import page as gpu_page
from bench.plots import Draw
from bench.slow_link import PLAIN, Course, courses_of
from commhooks.lab.units import format_rate, parse_rate

HEADLINE = "100mbit-4"
"""The race of the headline and of its plot: rate of the link and ranks."""
RACES = (HEADLINE, "100mbit-2", "1gbit-4", "1gbit-2")
_ONE_WORKER = (
    *("diloco", "one-worker DiLoCo", "one-worker DiLoCo, momentum 0.5"),
    *("diloco with int4 and Muon", "one-worker DiLoCo with Muon", "plain averaging with Muon"),
)
_MARKED = re.compile(r"<!--=(?P<name>[^>]+)-->(?P<old>.*?)<!--=-->", re.DOTALL)
_LIMIT = 0.02
"""The change of the loss that counts as a loss."""


class UnknownFactError(LookupError):
    """A page has a mark that nothing is computed for."""


def fill(text: str, known: Mapping[str, str]) -> str:
    """Return a page with the present figures between its marks.

    Raises:
        UnknownFactError: a mark has an unknown name.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in known:
            raise UnknownFactError(
                f"expected a figure that bench/summary.py computes; found {name!r}. Known are: "
                f"{', '.join(sorted(known))}"
            )
        new = f"\n\n{known[name]}\n\n" if "\n" in match["old"] else known[name]
        return f"<!--={name}-->{new}<!--=-->"

    return _MARKED.sub(replace, text)


def plots(results: Path) -> dict[str, Draw]:
    """Return the plots, by file name."""
    record = Record.load(max(results.glob("*-fidelity.json")))
    by_task = {task: rows(record, task) for task in measured_tasks(record)}
    return {
        "fidelity.svg": figures.fidelity(by_task),
        "slow-link.svg": figures.slow_link(courses_of(_race(results, HEADLINE))),
        "scaling.svg": figures.scaling(_newest(results, "*-links.json")["cells"]),
        "kernels.svg": figures.kernels(_newest(results, "*-kernels.json")["benchmarks"]),
    }


def facts(results: Path) -> dict[str, str]:
    """Return all figures by name."""
    found = _fidelity(Record.load(max(results.glob("*-fidelity.json"))))
    for race in RACES:
        found |= _of_race(race, _race(results, race))
    races = {race: courses_of(_race(results, race)) for race in RACES}
    found |= _links(_newest(results, "*-links.json")["cells"])
    found |= _kernels(_newest(results, "*-kernels.json")["benchmarks"])
    found |= _averaging(_newest(results, "*-2-cores-averaging.json")["benchmarks"])
    found |= _four_ranks(_newest(results, "*-averaging-4-ranks.json")["benchmarks"])
    found |= _comparison(_newest(results, "*-compare-1gbit.json")["rows"])
    found |= _torch_hooks(_newest(results, "*-torch-hooks.json"))
    found |= gpu_page.facts(_newest_gpu_check(results))
    return found | {"headline": _headline(found), "races": _of_all_races(races)}


def _newest(results: Path, pattern: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(max(results.glob(pattern)).read_text())
    return document


def _newest_gpu_check(results: Path) -> dict[str, Any]:
    """Return the newest run of ``make gpu-check``, whose file is named after the device."""
    runs = (json.loads(path.read_text()) for path in sorted(results.glob("*.json"), reverse=True))
    return next(run for run in runs if {"stages", "machine"} <= run.keys())


def _race(results: Path, race: str) -> dict[str, Any]:
    return _newest(results, f"*-{race}-ranks.json")


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(
        f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *lines]
    )


def _percent(change: float, digits: int = 1) -> str:
    return f"{100 * change:+.{digits}f} %"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# ------------------------------------------------------------------------------------- fidelity


def _fidelity(record: Record) -> dict[str, str]:
    measured = {hook: list(found.values()) for hook, found in by_hook(record).items()}
    worst = {hook: max(row.change for row in found) for hook, found in measured.items()}
    shares = {hook: max(row.byte_share for row in found) for hook, found in measured.items()}
    within = [hook for hook, change in worst.items() if change <= _LIMIT]
    least = min(within, key=shares.__getitem__)
    tasks = measured_tasks(record)
    plain = [next(iter(plain_runs(record, task).values())) for task in tasks]
    spreads = [spread(runs) for runs in plain if len(runs) > 1]
    seeds = {len(row.runs) for found in measured.values() for row in found}
    gpt = rows(record, "gpt")
    beyond = [hook for hook in sorted(worst, key=worst.__getitem__) if hook not in within]
    return {
        "hooks": str(len(worst)),
        "within": str(len(within)),
        "within names": _code(within),
        "least": f"`{least}`",
        "least share": f"{100 * shares[least]:.0f} %",
        "beyond": textwrap.fill(_code(beyond), 118),
        "spread": f"{100 * mean(spreads):.0f} %",
        "seeds": f"{min(seeds)} to {max(seeds)}",
        "front": _trainings(_front(gpt)),
        "one worker": _trainings(row for row in gpt if row.trained.title in _ONE_WORKER),
        **{f"loss {row.trained.title}": _percent(row.change_to_usual) for row in gpt},
        **{f"worst {hook}": f"{100 * change:.0f} %" for hook, change in worst.items()},
    }


def _front(found: list[Row]) -> list[Row]:
    points = {(row.byte_share, row.change_to_usual): row for row in found}
    return [points[point] for point in figures.pareto_front(list(points))]


def _trainings(found: Iterable[Row]) -> str:
    return table(
        ["training", "optimizer", "bytes", "loss against plain averaging with AdamW", "by seed"],
        [
            [
                row.trained.label,
                row.trained.recipe or TASKS["gpt"].usual,
                f"1/{1 / row.byte_share:,.{0 if row.byte_share < 0.01 else 1}f}",
                _percent(row.change_to_usual),
                ", ".join(map(_percent, row.changes_to_usual)),
            ]
            for row in found
        ],
    )


# ------------------------------------------------------------------------- training over a link


def _of_race(race: str, document: dict[str, Any]) -> dict[str, str]:
    courses, about = courses_of(document), document["about"]
    seconds = _arrivals(courses)
    found = {
        "parameters": f"{about['parameters'] / 1e6:.1f} million",
        "ranks": str(about["ranks"]),
        "rate": format_rate(about["bits_per_second"]),
        "loss": f"{courses[PLAIN].lowest.validation_loss:.3f}",
        "steps": str(courses[PLAIN].lowest.step),
        "names": _code(short(hook) for hook in seconds if hook not in (PLAIN, "noop")),
        "machine": "{cpu}, {cores} cores, torch {torch}, Python {python}".format(**about),
        "table": race_table(courses),
    }
    for hook, course in courses.items():
        found[f"{short(hook)} step"] = f"{course.points[-1].seconds / course.points[-1].step:.2g} s"
    for hook, arrival in seconds.items():
        found[short(hook)] = f"{arrival:.0f} s"
        for other in (PLAIN, "bf16"):
            found[f"{short(hook)} to {other}"] = _times(seconds[other] / arrival)
    return {f"{race} {name}": text for name, text in found.items()}


def race_table(courses: Mapping[str, Course]) -> str:
    """Return the times of hooks to plain averaging's lowest loss, the fastest first."""
    seconds, loss = _arrivals(courses), courses[PLAIN].lowest.validation_loss
    lasts = {hook: course.points[-1] for hook, course in courses.items()}
    never = [hook for hook in lasts if hook not in seconds]
    never.sort(key=lambda hook: lasts[hook].validation_loss)
    lines = []
    for hook in (*seconds, *never):
        last, arrival = lasts[hook], courses[hook].first_at(loss)
        line = [f"`{hook}`".replace("|", "\\|"), f"{last.seconds / last.step:.2g} s"]
        line += [f"{last.wire_bytes / last.step / 1e6:.2g} MB"]
        if arrival is None:
            line += [f"not in {last.step} steps: {last.validation_loss:.3f}", "", ""]
        else:
            line += [f"{arrival.seconds:.0f} s, {arrival.step} steps"]
            others = (seconds.get(other) for other in (PLAIN, "bf16"))
            line += [_times(other / arrival.seconds) if other else "" for other in others]
        lines.append(line)
    columns = ["hook", "step", "sent per step", "time to that loss", "times faster", "than `bf16`"]
    return table(columns, lines)


def _arrivals(courses: Mapping[str, Course]) -> dict[str, float]:
    """Return the seconds after which hooks reach plain averaging's lowest loss, the first first."""
    loss = courses[PLAIN].lowest.validation_loss
    points = {hook: course.first_at(loss) for hook, course in courses.items()}
    seconds = {hook: point.seconds for hook, point in points.items() if point is not None}
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def _of_all_races(races: Mapping[str, Mapping[str, Course]]) -> str:
    """Return a table of all hooks over all links."""
    seconds = {race: _arrivals(courses) for race, courses in races.items()}
    lines = []
    for hook in dict.fromkeys([*seconds[HEADLINE], *races[HEADLINE]]):
        line = [f"`{short(hook)}`"]
        for found in seconds.values():
            ratios = [found[other] / found[hook] for other in (PLAIN, "bf16") if hook in found]
            line.append(" / ".join(map(_times, ratios)) or "never")
        lines.append(line)
    links = [race.partition("-") for race in races]
    titles = [f"{format_rate(parse_rate(rate))}, {ranks} ranks" for rate, _, ranks in links]
    return table(["hook", *titles], lines)


def _headline(known: Mapping[str, str]) -> str:
    of = {name.removeprefix(f"{HEADLINE} "): text for name, text in known.items()}
    names = re.findall("`(.*?)`", of["names"])
    best, safe = names[0], next(name for name in names if f"`{name}`" in known["within names"])
    text = (
        f"A GPT of {of['parameters']} parameters on {of['ranks']} ranks over {of['rate']} reaches "
        f"plain averaging's lowest loss with `{safe}` in {of[safe]} instead of {of[PLAIN]}: "
        f"{of[f'{safe} to {PLAIN}']} times faster than plain averaging, {of[f'{safe} to bf16']} "
        f"times faster than `bf16`. `{best}` takes {of[best]} ({of[f'{best} to {PLAIN}']} and "
        f"{of[f'{best} to bf16']} times), but ends trainings up to {known[f'worst {best}']} above "
        f"plain averaging's loss, even after a warm-up; `{safe}` stays within 2 %."
    )
    return textwrap.fill(text, 118, break_on_hyphens=False)


# --------------------------------------------------------------------------------- single steps


def _links(cells: list[dict[str, Any]]) -> dict[str, str]:
    errors = [abs(cell["predicted_seconds"] / cell["measured_seconds"] - 1) for cell in cells]
    return {
        "cells": str(len(cells)),
        "median error": f"{100 * statistics.median(errors):.0f} %",
        "worst error": f"{100 * max(errors):.0f} %",
    }


def _kernels(benchmarks: list[dict[str, Any]]) -> dict[str, str]:
    shares = [
        row["extra_info"]["share_of_copy"]
        for row in benchmarks
        if row["name"].startswith(("test_encode", "test_decode"))
    ]
    return {
        "codecs": f"{min(shares):.2f} to {max(shares):.2f}",
        "codecs in the median": f"{statistics.median(shares):.2f}",
    }


def _averaging(benchmarks: list[dict[str, Any]]) -> dict[str, str]:
    """Return the spans of shares of torch's step over both gradient modes."""

    def span(model: str, hook: str) -> str:
        found = [row for row in benchmarks if row["name"].startswith(f"test_averaging[{model}-")]
        ratios = [
            row["extra_info"]["ratio_to_torch"]
            for row in found
            if row["extra_info"]["hook"] == hook
        ]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return {
        f"averaging {size}{way}": span(model, f"allreduce{way}")
        for size, model in (("large", "Transformer"), ("small", "ManySmall"))
        for way in ("", ", host memory")
    }


def _four_ranks(benchmarks: list[dict[str, Any]]) -> dict[str, str]:
    found = {row["extra_info"]["hook"]: row["extra_info"]["ratio_to_torch"] for row in benchmarks}
    return {"averaging of four, host memory": f"{found['allreduce, host memory']:.2f}"}


def _comparison(measured: list[dict[str, Any]]) -> dict[str, str]:
    seconds: dict[str, dict[str, float]] = {}
    for row in measured:
        seconds.setdefault(row["hook"], {})[row["link"]] = row["step_seconds"]
    hooks = [hook for hook in seconds if hook not in ("bare", "torch")]
    shares = {
        hook: [
            seconds[hook][link] / seconds[other][link]
            for link in ("loopback", "1 Gbit/s")
            for other in ("torch", "bf16")
        ]
        for hook in hooks
    }
    columns = ["hook", "loopback: to torch's", "to `bf16`", "1 Gbit/s: to torch's", "to `bf16`"]
    lines = [[f"`{short(hook)}`", *(f"{s:.2f}" for s in shares[hook])] for hook in hooks]
    compressing = [hook for hook in hooks if hook not in (PLAIN, "bf16")]
    peaks = {row["hook"]: f"{row['peak_bytes'] / 1e9:.2f} GB" for row in measured}
    return {
        "single step": table(columns, lines),
        "slower": str(sum(shares[hook][0] > 1 for hook in compressing)),
        "compressing": str(len(compressing)),
        **{f"loopback {short(hook)} to bf16": f"{shares[hook][1]:.2f}" for hook in hooks},
        **{f"memory {short(hook)}": peak for hook, peak in peaks.items()},
    }


def _torch_hooks(document: dict[str, Any]) -> dict[str, str]:
    rows = {row["hook"]: row for row in document["rows"]}
    theirs = {
        hook.removesuffix("_hook").removesuffix("_compress").lower(): hook
        for hook in document["tried"]
    }
    unit = rows["allreduce_hook"]["step_seconds"]
    lines = []
    for hook in (hook for hook in rows if hook in theirs):
        pair = [rows.get(name) for name in (hook, theirs[hook])]
        lines.append([f"`{hook}`", f"`{theirs[hook]}`"])
        for key, divisor, digits in ("step_seconds", unit, ".2f"), ("validation_loss", 1, ".3f"):
            lines[-1] += [f"{row[key] / divisor:{digits}}" if row else "fails" for row in pair]
    columns = ["here", "torch", "step here", "step there", "loss here", "loss there"]
    return {"torch hooks": table(columns, lines), "torch hooks tried": _trials(document["tried"])}


def _trials(tried: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """Return how trials of torch's hooks ended, on several buckets and on one."""
    ends = {
        hook: ["; ".join(f"{n}: {how}" for how, n in found.items()) for found in by_count.values()]
        for hook, by_count in tried.items()
    }
    lines = [[f"`{hook}`", a, "the same" if a == b else b] for hook, (a, b) in ends.items()]
    return table(["hook", "several buckets", "one bucket"], lines)
