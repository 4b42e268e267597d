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

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; line-height: 1.3; }
code { overflow-wrap: anywhere; }
.plots { display: grid; gap: 1rem; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 60rem) { .plots { grid-template-columns: 1fr 1fr; } }
figure { margin: 0; background: white; border-radius: 6px; padding: .5rem; }
figure svg { max-width: 100%; height: auto; display: block; margin: auto; }
"""


def comparison_page(comparison: Comparison) -> str:
    """Return the page: the command, the machine, the comparison as text, and plots."""
    title = f"{escape(comparison.model)} on {comparison.world_size} ranks"
    command = shlex.join(["commhooks", *sys.argv[1:]])
    machine = ", ".join(f"{name}: {value}" for name, value in comparison.machine.items())
    figures = "\n".join(map(_figure, panels(comparison)))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>Communication hooks, measured by <code>commhooks compare</code> in {comparison.steps} steps per
hook and link, on {datetime.now():%Y-%m-%d, %H:%M}, with commhooks {_version()}.
{escape(machine)}.</p>
<p><code>$ {escape(command)}</code></p>
<pre tabindex="0">{escape(str(comparison))}</pre>
<div class="plots">
{figures}
</div>
</body>
</html>
"""


def _version() -> str:
    try:
        return importlib.metadata.version("commhooks")
    except importlib.metadata.PackageNotFoundError:
        return "from a source folder"


def _figure(draw: Callable[..., None]) -> str:
    text = io.StringIO()
    save([draw], text, format="svg")
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return f"<figure>{svg}</figure>"
