"""The measured runs, in a file that grows run by run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import commhooks
from bench.fidelity.trained_hooks import RANKS
from commhooks.lab.machine import describe_machine

__all__ = ["Record", "Run"]


@dataclass(frozen=True)
class Run:
    """One training. ``config``: the registered hook with all options.

    Figures are means over ranks. ``accuracy`` is None if the task has none.
    """

    task: str
    hook: str
    config: dict[str, Any]
    recipe: str
    seed: int
    loss: float
    accuracy: float | None
    wire_bytes: float

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Return the key of the run. A record keeps the last run for each key."""
        config = json.dumps(self.config, sort_keys=True)
        return self.task, self.hook, self.recipe, config, self.seed


class Record:
    """The runs of a JSON file, ``{"about": {...}, "runs": [...]}``."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.about: dict[str, Any] = document["about"]
        entries = (entry | {"config": _completed(entry["config"])} for entry in document["runs"])
        self._runs = {run.key: run for run in (Run(**entry) for entry in entries)}

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a file; a record without runs if there is none."""
        return cls(json.loads(path.read_text()) if path.exists() else {"about": {}, "runs": []})

    def runs(self, task: str, hook: str, config: dict[str, Any], recipe: str) -> list[Run]:
        """Return the runs of a hook with these options, by seed."""
        return [
            run
            for key, run in sorted(self._runs.items())
            if key[:3] == (task, hook, recipe) and run.config == config
        ]

    def add(self, run: Run) -> None:
        """Add a run, in place of an older one with the same key."""
        self._runs[run.key] = run
        machine = describe_machine()
        cpus = {*self.about.get("cpu", "").split(" and "), str(machine["cpu"])} - {""}
        self.about = {"ranks": RANKS, **machine, "cpu": " and ".join(sorted(cpus))}

    def save(self, path: Path) -> None:
        """Write the file, all of it or nothing."""
        runs = [asdict(self._runs[key]) for key in sorted(self._runs)]
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"about": self.about, "runs": runs}, indent=1) + "\n")
        new.replace(path)


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """Add the options that the hook did not have when it was run, at their defaults."""
    try:
        return commhooks.create(config).to_config()
    except commhooks.CommHookError:
        return config  # with options or a hook that no longer exist
