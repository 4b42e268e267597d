"""Write the parts of docs/hooks that are made from the code and the results: ``make results``.

A part stands between marks, see bench/summary.py; people write the rest of a page. Every page of a
hook has the sections of :data:`FORM`, in this order, but for "What happens when", if there is
nothing to say. It may have more.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # for `bench`, which is not installed

import commhooks  # noqa: E402
from bench import summary  # noqa: E402
from bench.fidelity.runs import Record, Row  # noqa: E402
from bench.fidelity.tasks import TASKS  # noqa: E402
from bench.files import newest  # noqa: E402
from commhooks import algorithms  # noqa: E402

PAGES = ROOT / "docs" / "hooks"
FORM = [
    "When to use it",
    "What it does",
    "Options",
    "Cost",
    "Fidelity",
    "What happens when",
    "Source",
]
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


_TITLES = {
    "exact": "Plain averaging",
    "quantized": "Few bits",
    "sparse": "Few elements",
    "lowrank": "Low rank",
    "averaging": "Fewer partners",
    "wrappers": "Hooks around hooks",
    "adaptive": "Hooks that adapt",
}
FAMILIES = tuple(
    Family(
        name,
        title,
        tuple(n for n in sorted(algorithms.HOOKS) if commhooks.describe(n).family == name),
    )
    for name, title in _TITLES.items()
)
NAMES = {hook: family for family in FAMILIES for hook in family.hooks}


def made(page: Path) -> str:
    """Return the text of a page with its parts and figures made anew."""
    text = page.read_text()
    parts = {name: part(page.stem) for name, part in PARTS.items() if f"<!--={name}-->" in text}
    return summary.fill(text, _figures() | parts)


def sections_of(text: str) -> tuple[str, dict[str, str]]:
    """Split a page at its headings of the second level."""
    start, *parts = ("\n" + text).split("\n## ")
    pairs = (part.partition("\n") for part in parts)
    return start, {title.strip(): body.strip() for title, _, body in pairs}


# ---------------------------------------------------------------------------------- the parts


def facts(name: str) -> str:
    info = commhooks.describe(name)
    wraps = any("CommHook" in option.type for option in info.options)
    exact = "exact" if info.lossless else "lossy"
    backends = {"gloo": "Gloo", "nccl": "NCCL (run on one GPU)"}
    rows = {
        "average": "as exact as its hooks" if info.lossless and wraps else exact,
        "ranks": "same result" if info.consensus else "different results",
        "backends": ", ".join(backends.get(backend, backend) for backend in info.backends),
    }
    if info.needs:
        rows["needs"] = ", ".join(info.needs)
    lines = [info.summary, "", summary.table([rows])]
    if losing := tasks_beyond(name):
        tasks = ", ".join(losing)
        lines += ["", "> [!WARNING]"]
        lines += [f"> The measured loss is more than 2 % higher on {tasks}: [fidelity](#fidelity)."]
    return "\n".join(lines)


def tasks_beyond(name: str) -> list[str]:
    """Return the tasks on which the hook loses more than :data:`MUCH`."""
    found = _record().by_hook.get(name, {})
    return [task for task, row in found.items() if 100 * row.change > MUCH]


def options(name: str) -> str:
    info = commhooks.describe(name)
    if not info.options:
        return "None."
    rows = []
    for option in info.options:
        default = "required" if option.required else f"`{option.default!r}`"
        limits = ", ".join(limit.replace(" ", _SPACE) for limit in option.constraints)
        kind = option.type.replace("|", "or") + (f" ({limits})" if limits else "")
        row = {"option": f"`{option.name}`", "type": kind, "default": default}
        rows.append(row | {"meaning": _inline(option.text)})
    return summary.table(rows)


def _inline(text: str) -> str:
    """Return a docstring as one line of Markdown for a table."""
    return " ".join(text.replace("``", "`").split())


def cost(name: str) -> str:
    return f"**On the wire**, per step: {commhooks.describe(name).wire}."


def fidelity(name: str) -> str:
    by_task = _record().by_hook.get(name)
    if not by_task:
        return "Exact." if commhooks.describe(name).lossless else "Not measured."
    found = by_task.values()
    trained = next(iter(found)).trained.description
    cells: dict[str, Callable[[Row], str]] = {
        "change of the loss": lambda row: _percent(row.change, bold=MUCH),
        "by seed": lambda row: ", ".join(map(_percent, row.changes)),
        "bytes sent": lambda row: share_in_percent(row.byte_share),
    }
    if any(row.control_change is not None for row in found):
        cells["the same on one rank alone"] = _control
    rows = [
        {"": name} | {task: cell(row) for task, row in by_task.items()}
        for name, cell in cells.items()
    ]
    text = (
        f"{trained}, warm-ups included "
        "([how this was measured](index.md#how-fidelity-was-measured)):"
    )
    return "\n".join([text, "", summary.table(rows)])


def _control(row: Row) -> str:
    return "" if row.control_change is None else _percent(row.control_change)


def source(name: str) -> str:
    info = commhooks.describe(name)
    module, _, kind = algorithms.HOOKS[name].partition(":")
    file = f"commhooks/algorithms/{module.replace('.', '/')}.py"
    paper = f"Paper: <{info.paper}>. " if info.paper else ""
    pages = {f"{NAMES[name].name}.md": "the hooks of this family", "index.md": "all hooks"}
    links = [
        f"[{text}]({page}#what-happens-when)"
        for page, text in pages.items()
        if "\n## What happens when" in (PAGES / page).read_text()
    ]
    return f"{paper}Code: `{file}`, class `{kind}`. What happens when: see {' and '.join(links)}."


def overview(_: str) -> str:
    """Return the tables of all hooks, by family."""
    parts = []
    for family in FAMILIES:
        parts += [f"## {family.title}", "", _first_paragraph(family), ""]
        rows = []
        for name in family.hooks:
            info = commhooks.describe(name)
            by_task = _record().by_hook.get(name, {})
            unknown = "exact" if info.lossless else "-"
            losses = {task: _loss(by_task[task]) if task in by_task else unknown for task in TASKS}
            row = {"hook": f"[`{name}`]({name}.md)", "sends": info.wire, **losses}
            rows.append(row | {"bytes sent": _byte_shares(by_task)})
        parts += [summary.table(rows), ""]
    return "\n".join(parts).rstrip()


def _loss(row: Row) -> str:
    """Return the change of the loss, and that of the control of DiLoCo."""
    control = _control(row)
    return _percent(row.change, bold=MUCH) + (f" (one rank alone {control})" if control else "")


def _first_paragraph(family: Family) -> str:
    paragraph = (PAGES / f"{family.name}.md").read_text().split("\n\n")[1]
    return f"{paragraph} [More]({family.name}.md)"


def conditions(_: str) -> str:
    record = _record()
    tasks = "\n".join(f"- *{task}*: {kind.summary}." for task, kind in TASKS.items())
    spreads = ", ".join(f"{100 * spread:.1f} % ({t})" for t, spread in record.spreads.items())
    return (
        "Change of the validation loss against plain averaging on the same data, mean over seeds, "
        f"on {record.about['ranks']} ranks on CPU, at the hook's defaults and plain averaging's "
        f"learning rate:\n\n{tasks}\n\nUnder plain averaging itself seeds are up to {spreads} "
        f"apart. **Bold**: more than {MUCH:.0f} %. `bench/README.md` has the method, "
        "[results](../results.md) everything measured."
    )


PARTS: dict[str, Callable[[str], str]] = {
    part.__name__: part for part in (facts, options, cost, fidelity, source, overview, conditions)
}


# ------------------------------------------------------------------------------ figures and tables


@functools.cache
def _figures() -> dict[str, str]:
    return summary.facts(ROOT / "bench" / "results")


@functools.cache
def _record() -> Record:
    return Record(newest(ROOT / "bench" / "results", "*-fidelity.json"))


def _percent(change: float, *, bold: float | None = None) -> str:
    text = f"{100 * change:+.1f}{_SPACE}%".replace("-", _MINUS)
    return f"**{text}**" if bold is not None and 100 * change > bold else text


def _byte_shares(by_task: dict[str, Row]) -> str:
    """Return the smallest and the largest share of plain averaging's bytes."""
    shares = sorted(row.byte_share for row in by_task.values())
    ends = dict.fromkeys(share_in_percent(share) for share in (*shares[:1], *shares[-1:]))
    return " to ".join(ends)


def share_in_percent(share: float) -> str:
    """Return a share with two digits, or three from 100 % on."""
    percent = 100 * share
    return f"{percent:.0f}{_SPACE}%" if percent >= 10 else f"{percent:.2g}{_SPACE}%"


def main() -> None:
    """Write all pages."""
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(made(page))


if __name__ == "__main__":
    main()
