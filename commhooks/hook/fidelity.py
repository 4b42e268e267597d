"""The loss that trainings end with under each hook: figures of bench/fidelity in fidelity.json."""

import functools
import json
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Fidelity", "fidelity_of"]


@dataclass(frozen=True)
class Fidelity:
    """The change of the final validation loss, relative to plain averaging, in percent.

    ``digits`` and ``bytes`` are the two tasks, see ``bench/README.md``; None means not measured.
    The figures are means over ``seeds`` seeds.
    """

    digits: float | None
    bytes: float | None
    seeds: int

    def __str__(self) -> str:
        tasks = {"digits": self.digits, "bytes": self.bytes}
        changes = [
            f"{value:+.1f} % on {task}" for task, value in tasks.items() if value is not None
        ]
        return f"{', '.join(changes)} ({self.seeds} seed{'s' * (self.seeds != 1)})"


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
        name: Fidelity(row.get("digits"), row.get("bytes"), row["seeds"])
        for name, row in figures.items()
    }
