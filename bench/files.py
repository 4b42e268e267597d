"""Files of results, which grow while something is measured."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commhooks.lab.machine import describe_machine


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


class Results:
    """A file of runs, to which each is added when it ends, so that measuring may be interrupted.

    ``document`` is ``{machine: {...}, runs: [{...}, ...]}``, with keys that tell the kind of file.
    ``about``: what it says beside the properties of the machine.
    """

    def __init__(
        self, path: Path, machine: str = "about", runs: str = "runs", **about: Any
    ) -> None:
        self.document: dict[str, Any] = load(path, {machine: {}, runs: []})
        self.runs: list[dict[str, Any]] = self.document[runs]
        self._path, self._machine, self._about = path, self.document[machine], about

    def once(self, run: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Any:
        """Return what the file has of a run; if it has nothing, measure and add it."""
        for known in self.runs:
            if run.items() <= known.items():
                return known
        shown = ", ".join(f"{name} {value}" for name, value in run.items())
        print(shown, end="", flush=True)
        start = time.monotonic()
        self.runs.append(found := {**run, **measure()})
        print(f": {time.monotonic() - start:.0f} s", flush=True)
        machine = describe_machine()
        cpus = {*self._machine.get("cpu", "").split(" and "), str(machine["cpu"])} - {""}
        self._machine |= self._about | machine | {"cpu": " and ".join(sorted(cpus))}
        save(self._path, self.document)
        return found
