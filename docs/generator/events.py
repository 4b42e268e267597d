"""Hooks of MkDocs: complete the navigation, add references, convert formulas.

``GradBucket`` is compiled and commands are made by click, so mkdocstrings does not see them.
"""

import logging
import re
from pathlib import Path
from typing import Any

import compiled_pages
import hook_pages
import mathml

ROOT = Path(__file__).resolve().parents[2]


def on_config(config: Any) -> None:
    """Complete the navigation: a section per family of hooks, and all design notes."""
    for name in ("bench", "torch", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for section in config.nav:
        (title, pages) = next(iter(section.items()))
        if title == "Hooks":
            pages[1:1] = [
                {family.title: [f"hooks/{name}.md" for name in (family.name, *family.hooks)]}
                for family in hook_pages.FAMILIES
            ]
        if title == "Contribute":
            notes = sorted((ROOT / "docs" / "design").glob("*.md"), reverse=True)
            pages.append({"Design notes": [f"design/{path.name}" for path in notes]})


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add what is made from the code."""
    match page.file.src_uri:
        case "reference/authors.md":
            return markdown + compiled_pages.bucket()
        case "reference/command-line.md":
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
