"""Pages of hooks: what people have written in docs/hooks, and what the code and the results say.

Every page has the sections of :data:`FORM`, in this order. A page may have more sections. A section
that is made from the code begins with that, and what the page says about it follows. "What happens
when" ends with what the page of the family and the page of all hooks say there.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import commhooks
from bench.fidelity.published import by_hook
from bench.fidelity.record import Record
from bench.fidelity.rows import Row, measured_tasks, plain_runs, spread
from bench.fidelity.tasks import TASKS
from commhooks import algorithms

FORM = [
    "When to use it",
    "What it does",
    "Options",
    "Cost",
    "Fidelity",
    "What happens when",
    "Source",
]
ROOT = Path(__file__).resolve().parents[2]
MUCH = 2.0
"""Percent of the validation loss: what a hook loses beyond that, its page says first."""
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"
"""Between a number and its unit or its limit, so that both stay in one line."""


@dataclass(frozen=True)
class Family:
    """The hooks of a folder in commhooks/algorithms."""

    name: str
    title: str
    hooks: tuple[str, ...]

    @property
    def page(self) -> str:
        return f"hooks/{self.name}.md"


_KINDS = {kind.name: kind for kind in map(algorithms.__dict__.get, algorithms.__all__)}
_TITLES = {
    "exact": "Plain averaging",
    "quantized": "Few bits",
    "sparse": "Few elements",
    "lowrank": "Low rank",
    "averaging": "Fewer partners",
    "wrappers": "Hooks around hooks",
    "adaptive": "Hooks that adapt",
}


def _families() -> Iterator[Family]:
    for name, title in _TITLES.items():
        yield Family(
            name, title, tuple(n for n in sorted(_KINDS) if commhooks.describe(n).family == name)
        )


FAMILIES = tuple(_families())
NAMES = {hook: family for family in FAMILIES for hook in family.hooks}


# ------------------------------------------------------------------------------ putting together


def assemble(name: str, written: str) -> str:
    """Return the page of a hook: its written sections, and those that are made."""
    start, sections = sections_of(written)
    shared = [_written(NAMES[name].page).get(FORM[5], ""), _written("hooks/index.md")[FORM[5]]]
    made: dict[str, Callable[[str], str]] = {
        "Options": _options,
        "Cost": _cost,
        "Fidelity": _fidelity,
        "Source": _source,
    }
    parts = [start.rstrip(), _facts(name)]
    for title in _in_order(list(sections)):
        texts = [made[title](name)] if title in made else []
        texts += [sections[title]] if title in sections else []
        texts += shared if title == FORM[5] else []
        if any(texts):
            parts += [f"## {title}", "\n\n".join(filter(None, texts))]
    return "\n\n".join(parts) + "\n"


def _written(page: str) -> dict[str, str]:
    return sections_of((ROOT / "docs" / page).read_text())[1]


def sections_of(text: str) -> tuple[str, dict[str, str]]:
    """Split a page at its headings of the second level."""
    start, *parts = ("\n" + text).split("\n## ")
    pairs = (part.partition("\n") for part in parts)
    return start, {title.strip(): body.strip() for title, _, body in pairs}


def _in_order(written: list[str]) -> Iterator[str]:
    """Yield the titles of the form; other titles follow the one that they follow in the page."""
    for title in FORM:
        yield title
        if title in written:
            for other in written[written.index(title) + 1 :]:
                if other in FORM:
                    break
                yield other


# ---------------------------------------------------------------------------------- made sections


def _facts(name: str) -> str:
    info = commhooks.describe(name)
    wraps = any("CommHook" in option.type for option in info.options)
    exact = "exact" if info.lossless else "lossy"
    facts = {
        "average": "as exact as its hooks" if info.lossless and wraps else exact,
        "ranks": "same result" if info.consensus else "different results",
        "backends": ", ".join(info.backends),
        "on CUDA": "not yet measured",
    }
    if info.needs:
        facts["needs"] = ", ".join(info.needs)
    lines = [info.summary, "", f"| {' | '.join(facts)} |", "|---" * len(facts) + "|"]
    lines += [f"| {' | '.join(facts.values())} |"]
    by_task = _measured().get(name, {})
    if losing := tasks_beyond(name):
        found = ", ".join(f"{_percent(row.change)} on {task}" for task, row in by_task.items())
        lines += [
            "",
            f'!!! warning "The measured loss is more than 2 % higher on {", ".join(losing)}"',
            f"    Validation loss against plain averaging at the defaults: {found}.",
            "    [Fidelity](#fidelity) says how that was measured.",
        ]
    return "\n".join(lines)


def tasks_beyond(name: str) -> list[str]:
    """Return the tasks on which the hook loses more than :data:`MUCH`."""
    found = _measured().get(name, {})
    return [task for task, row in found.items() if 100 * row.change > MUCH]


def _options(name: str) -> str:
    info = commhooks.describe(name)
    if not info.options:
        return "None."
    lines = ["| option | type | default | |", "|---|---|---|---|"]
    for option in info.options:
        default = "required" if option.required else f"`{option.default!r}`"
        limits = ", ".join(limit.replace(" ", _SPACE) for limit in option.constraints)
        kind = option.type.replace("|", "or")
        note = _inline(option.text)
        lines.append(
            f"| `{option.name}` | {kind}{f' ({limits})' if limits else ''} | {default} | {note} |"
        )
    return "\n".join(lines)


def _inline(text: str) -> str:
    """Return a docstring as one line of Markdown for a table."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def _cost(name: str) -> str:
    info = commhooks.describe(name)
    share = _byte_share(_measured().get(name, {}))
    lines = [f"**On the wire**, per step: {info.wire}."]
    if share:
        lines.append(
            f"In the trainings below, {share} of plain averaging's bytes ({', '.join(TASKS)}), "
            "warm-ups included."
        )
    return "\n".join(lines)


def _fidelity(name: str) -> str:
    info = commhooks.describe(name)
    by_task = _measured().get(name)
    if not by_task:
        return "Exact." if info.lossless else "Not measured."
    return f"{_table({name: by_task})}\n\n{_conditions()}"


def _source(name: str) -> str:
    info = commhooks.describe(name)
    file = Path(inspect.getsourcefile(_KINDS[name]) or "").relative_to(ROOT).as_posix()
    paper = f"Paper: <{info.paper}>. " if info.paper else ""
    return f"{paper}Code: `{file}`, class `{_KINDS[name].__name__}`."


def overview() -> str:
    """Return the tables of all hooks, by family."""
    parts = []
    for family in FAMILIES:
        parts += [f"## {family.title}\n", _first_paragraph(family)]
        parts += [
            f"\n| hook | sends | loss on {', '.join(TASKS)} | share of the bytes |",
            "|---|---|---|---|",
        ]
        for name in family.hooks:
            info = commhooks.describe(name)
            by_task = _measured().get(name, {})
            changes = _of_each_task(by_task, lambda row: _percent(row.change, bold=MUCH))
            exact = "exact" if info.lossless else "-"
            cells = [f"[`{name}`]({name}.md)", info.wire, changes or exact, _byte_share(by_task)]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join([*parts, _conditions(), ""])


def _first_paragraph(family: Family) -> str:
    text = (ROOT / "docs" / family.page).read_text()
    paragraph = text.split("\n\n")[1]
    return f"{paragraph} [More]({family.name}.md)"


# --------------------------------------------------------------------------------- fidelity


@functools.cache
def _measured() -> dict[str, dict[str, Row]]:
    return by_hook(_record())


@functools.cache
def _record() -> Record:
    return Record.load(max((ROOT / "bench" / "results").glob("*-fidelity.json")))


def _table(found: dict[str, dict[str, Row]]) -> str:
    columns = ["hook", *TASKS, "by seed", "share of plain averaging's bytes"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for by_task in found.values():
        label = next(iter(by_task.values())).trained.description
        changes = [
            _percent(by_task[task].change, bold=MUCH) if task in by_task else "not measured"
            for task in TASKS
        ]
        seeds = "; ".join(
            f"{task}: {', '.join(map(_percent, row.changes))}" for task, row in by_task.items()
        )
        lines.append(f"| {label} | {' | '.join(changes)} | {seeds} | {_byte_share(by_task)} |")
    return "\n".join(lines)


def _conditions() -> str:
    record = _record()
    tasks = " ".join(f"*{task}*: {kind.summary}." for task, kind in TASKS.items())
    known = {t: next(iter(plain_runs(record, t).values())) for t in measured_tasks(record)}
    spreads = " and ".join(
        f"{100 * spread(runs):.1f} % ({t})" for t, runs in known.items() if len(runs) > 1
    )
    return (
        '??? info "How this was measured"\n'
        "    Change of the validation loss against plain averaging on the same data, mean over "
        f"seeds, on {record.about['ranks']} ranks on CPU, at the hook's defaults and plain "
        f"averaging's learning rate. {tasks} Under plain averaging itself seeds are up to "
        f"{spreads} apart. **Bold**: more than {MUCH:.0f} %. `bench/README.md` has the method, "
        "[results](../results.md) everything measured.\n"
    )


def _percent(change: float, *, bold: float | None = None) -> str:
    text = f"{100 * change:+.1f}{_SPACE}%".replace("-", _MINUS)
    return f"**{text}**" if bold is not None and 100 * change > bold else text


def _byte_share(by_task: dict[str, Row]) -> str:
    return _of_each_task(by_task, lambda row: share_in_percent(row.byte_share))


def share_in_percent(share: float) -> str:
    """Return a share with two digits, or three from 100 % on."""
    percent = 100 * share
    return f"{percent:.0f}{_SPACE}%" if percent >= 10 else f"{percent:.2g}{_SPACE}%"


def _of_each_task(by_task: dict[str, Row], show: Callable[[Row], str]) -> str:
    """Return figures in the order of the tasks, with a dash for those not measured."""
    cells = (show(by_task[task]) if task in by_task else "-" for task in TASKS)
    return ", ".join(cells) if by_task else ""
