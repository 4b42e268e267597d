"""The file of results, which grows point by point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commhooks.lab.machine import describe_machine

__all__ = ["Record"]


class Record:
    """A JSON file: ``about``, ``errors`` by model and ranks, ``points`` and ``rate_changes``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.document: dict[str, Any] = (
            json.loads(path.read_text())
            if path.exists()
            else {"about": describe_machine(), "errors": {}, "points": {}, "rate_changes": {}}
        )

    def __getitem__(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = self.document[part]
        return found

    def add(self, part: str, name: str, entry: Any) -> None:
        """Add an entry and write the file, all of it or nothing."""
        self.document[part][name] = entry
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.document, indent=1) + "\n")
        new.replace(self._path)
