"""Files of results, which grow while something is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(path: Path, default: Any = None) -> Any:
    """Return the content of a JSON file, or ``default`` if there is none."""
    return json.loads(path.read_text()) if path.exists() else default


def save(path: Path, document: Any) -> None:
    """Write a JSON file, all of it or nothing."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n")
    new.replace(path)


def newest(results: Path, pattern: str) -> Any:
    """Return the content of the newest JSON file whose name matches; dates come first in names."""
    return json.loads(max(results.glob(pattern)).read_text())
