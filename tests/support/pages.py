"""Run the Python code of a page of the documentation."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page: str) -> list[str]:
    """Return the blocks of Python code of ``page``."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_page(page: str, folder: Path, *namespaces: dict[str, Any]) -> int:
    """Run the blocks of ``page`` in ``folder``, one after the other. Return their number.

    The last namespace is for all blocks that have none of their own. A line ``...`` stands for what
    the reader does in between.
    """
    blocks = blocks_of(page)
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        for number, block in enumerate(blocks):
            namespace = namespaces[min(number, len(namespaces) - 1)]
            exec(compile(block, os.fspath(DOCS / page), "exec"), namespace)
    return len(blocks)
