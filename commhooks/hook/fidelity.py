"""The loss that trainings end with under each hook: figures of bench/fidelity in fidelity.json."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Fidelity:
    """The change of the final validation loss, relative to plain averaging, in percent."""

    changes: Mapping[str, float]
    """Means over seeds, by the tasks that were measured: see ``bench/README.md``."""
    seeds: int
    """The number of seeds of the task with the fewest."""

    @property
    def worst(self) -> float:
        """The change on the task that suffers most."""
        return max(self.changes.values(), default=0.0)

    def __str__(self) -> str:
        changes = ", ".join(f"{value:+.1f} % on {task}" for task, value in self.changes.items())
        return f"{changes} (at least {self.seeds} seed{'s' * (self.seeds != 1)} each)"


def fidelity_of(name: str) -> Fidelity | None:
    """Return the figures of a hook with its default options, or None if it was not measured."""
    return _measured().get(name)


@functools.cache
def _measured() -> dict[str, Fidelity]:
    file = files("commhooks.hook") / "fidelity.json"
    found = {}
    for name, row in (json.loads(file.read_text()) if file.is_file() else {}).items():
        seeds = row.pop("seeds")
        changes = {task: change for task, change in row.items() if change is not None}
        found[name] = Fidelity(changes, seeds)
    return found
