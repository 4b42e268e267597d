"""A comparison as one HTML page that needs no other file and no network."""

import importlib.metadata
import io
import re
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from html import escape

from commhooks.cli.plots import panels, save
from commhooks.lab.comparison import Comparison
from commhooks.lab.comparison.result import Table

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; position: sticky; left: 0; }
code { overflow-wrap: anywhere; }
th, td { padding: .2rem .8rem; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid; }
td { border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace;
  position: sticky; left: 0; background: Canvas;
  min-width: 20vw; white-space: normal; overflow-wrap: anywhere; }
dt { font-weight: 600; float: left; clear: left; margin-right: .5rem; }
dd { margin: 0; }
.plots { display: grid; gap: 1rem; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 60rem) { .plots { grid-template-columns: 1fr 1fr; } }
figure { margin: 0; background: white; border-radius: 6px; padding: .5rem; }
figure svg { max-width: 100%; height: auto; display: block; margin: auto; }
.slow, .failed { color: #d33; font-weight: 600; }
"""


def comparison_page(comparison: Comparison) -> str:
    """Return the page: what was compared, on what, plots and tables, and what the columns mean."""
    groups = comparison.tables()
    explanations = (line.partition(": ") for tables in groups for line in tables[0].explanations)
    title = f"{escape(comparison.model)} on {comparison.world_size} ranks"
    command = shlex.join(["commhooks", *sys.argv[1:]])
    machine = ", ".join(f"{name}: {value}" for name, value in comparison.machine.items())
    about = (
        f"in {comparison.steps} steps per hook and link, on {datetime.now():%Y-%m-%d, %H:%M}, with "
        f"commhooks {_version()}. {escape(machine)}.</p>\n<p><code>$ {escape(command)}</code>"
    )
    parts = [
        f"<h1>{title}</h1>",
        f"<p>Communication hooks, measured by <code>commhooks compare</code> {about}</p>",
        *(
            f"<p><strong>{escape(name)}:</strong> {escape(text)}</p>"
            for name, _, text in (line.partition(": ") for line in comparison.remarks())
        ),
        *(
            f'<p><strong class="failed">Failed:</strong> {escape(str(failure))}.</p>'
            for failure in comparison.failures
        ),
        '<div class="plots">',
        *(_figure(draw) for draw in panels(comparison)),
        "</div>",
        *(_html(table) for tables in groups for table in tables),
        f"<dl>{''.join(f'<dt>{a}</dt><dd>{escape(b)}</dd>' for a, _, b in explanations)}</dl>",
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _version() -> str:
    try:
        return importlib.metadata.version("commhooks")
    except importlib.metadata.PackageNotFoundError:
        return "from a source folder"


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.names)
    body = ""
    for line in table.lines:
        cells = (*line, *[""] * (len(table.names) - len(line)))
        marks = (f' class="{cell}"' if cell in ("slow", "failed") else "" for cell in cells)
        tags = (f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, cells, strict=True))
        body += f"<tr>{''.join(tags)}</tr>\n"
    return (
        f'<div class="scroll" tabindex="0">\n<table>\n<caption>{escape(table.title)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>"
    )


def _figure(draw: Callable[..., None]) -> str:
    text = io.StringIO()
    save([draw], text, format="svg")
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return f"<figure>{svg}</figure>"
