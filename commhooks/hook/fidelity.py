"""The loss that trainings end with under each hook: figures of bench/fidelity in fidelity.json."""

import functools
import json
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Fidelity", "fidelity_of"]


@dataclass(frozen=True)
class Fidelity:
    """The change of the final validation loss, relative to plain averaging, in percent.

    ``digits``, ``bytes`` and ``gpt`` are the tasks, see ``bench/README.md``; None means not
    measured. The figures are means over seeds. ``seeds``: their number, of the task with the
    fewest.
    """

    digits: float | None
    bytes: float | None
    gpt: float | None
    seeds: int

    @property
    def changes(self) -> dict[str, float | None]:
        """Return the change by task."""
        return {"digits": self.digits, "bytes": self.bytes, "gpt": self.gpt}

    @property
    def worst(self) -> float:
        """Return the change on the task that suffers most."""
        return max((value for value in self.changes.values() if value is not None), default=0.0)

    def __str__(self) -> str:
        changes = [
            f"{value:+.1f} % on {task}" for task, value in self.changes.items() if value is not None
        ]
        return f"{', '.join(changes)} (at least {self.seeds} seed{'s' * (self.seeds != 1)} each)"


def fidelity_of(name: str) -> Fidelity | None:
    """Return the figures of a hook with its default options, or None if it was not measured."""
    return _measured().get(name)


@functools.cache
def _measured() -> dict[str, Fidelity]:
    file = files("commhooks.hook") / "fidelity.json"
    if not file.is_file():
        return {}
    figures = json.loads(file.read_text())
    return {
        name: Fidelity(row.get("digits"), row.get("bytes"), row.get("gpt"), row["seeds"])
        for name, row in figures.items()
    }
