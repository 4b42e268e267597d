"""What MkDocs calls while it builds the site: adds what is made from the code, and converts maths.

================================  =====================================================
page                              what is added
================================  =====================================================
hooks/NAME.md                     facts, options, costs, fidelity and source of the hook
hooks/index.md                    the table of all hooks
reference/authors.md              the compiled class ``GradBucket``
reference/command-line.md         the help of each command
================================  =====================================================
"""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import mathml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # for `bench`, which is not installed

import compiled_pages  # noqa: E402
import hook_pages  # noqa: E402


def on_config(config: Any) -> None:
    """Complete the navigation: a section per family of hooks, and all design notes."""
    for name in ("bench", "torch", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for section in config.nav:
        (title, pages) = next(iter(section.items()))
        if title == "Hooks":
            pages[1:1] = [
                {family.title: [family.page, *(f"hooks/{name}.md" for name in family.hooks)]}
                for family in hook_pages.FAMILIES
            ]
        if title == "Design":
            notes = sorted((ROOT / "docs" / "design").glob("*.md"), reverse=True)
            pages.append({"Notes": [f"design/{path.name}" for path in notes]})


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add what is made from the code."""
    path = page.file.src_uri
    if match := re.fullmatch(r"hooks/(\w+)\.md", path):
        name = match[1]
        if name == "index":
            return markdown.replace("## What", f"{hook_pages.overview()}\n## What", 1)
        if name in hook_pages.NAMES:
            return hook_pages.assemble(name, markdown)
    if path == "reference/authors.md":
        return markdown + compiled_pages.bucket()
    if path == "reference/command-line.md":
        return markdown + compiled_pages.commands()
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Turn formulas into MathML, which browsers show without a script."""
    if page.file.src_uri.startswith("reference/"):
        html = _without_sphinx(html)
    return mathml.convert(html)


def _without_sphinx(html: str) -> str:
    """Remove the marks that docstrings have for Sphinx: roles, and the colons before code."""
    html = re.sub(r":(?:class|func|meth|mod|attr):<code>", "<code>", html)
    return re.sub(r"<p>::</p>", "", html).replace("::</p>", ":</p>")
