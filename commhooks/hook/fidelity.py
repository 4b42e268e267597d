"""What training loses with a hook: figures of ``bench/fidelity``, kept in ``fidelity.json``."""

import functools
import json
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Fidelity", "fidelity_of"]


@dataclass(frozen=True)
class Fidelity:
    """The validation loss at the end over that with plain averaging, as a change in percent.

    ``digits`` and ``bytes`` are the two tasks, see ``bench/README.md``; None: not measured.
    ``seeds``: whose mean it is.
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
    """Of the hook of this name with its defaults; None if nobody has measured it."""
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
