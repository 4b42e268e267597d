"""What was measured, in a file that grows hook by hook."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commhooks.lab.comparison import TrainingPoint
from commhooks.lab.machine import describe_machine

__all__ = ["Course", "Record", "courses_of"]


@dataclass(frozen=True)
class Course:
    """The training with one hook. ``hook``: as :func:`commhooks.hook.spec.parse_hook_spec` reads.

    ``bare_step_seconds``: of a training step on each rank alone, just before and just after, which
    shows whether the machine was as fast as for the others; ``load``: its load average, likewise.
    """

    hook: str
    points: list[TrainingPoint]
    bare_step_seconds: tuple[float, float]
    load: tuple[float, float]

    @property
    def lowest(self) -> TrainingPoint:
        """Where the validation loss was least."""
        return min(self.points, key=lambda point: point.validation_loss)

    def first_at(self, loss: float) -> TrainingPoint | None:
        """The first point with at most this validation loss; None if there is none."""
        return next((point for point in self.points if point.validation_loss <= loss), None)


def courses_of(document: dict[str, Any]) -> dict[str, Course]:
    """Of the file's JSON, by hook."""
    return {entry["hook"]: _course(**entry) for entry in document["courses"]}


class Record:
    """The courses of a JSON file, ``{"about": {...}, "courses": [...]}``, by hook."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.courses = courses_of(json.loads(path.read_text())) if path.exists() else {}

    def add(self, course: Course, about: dict[str, object]) -> None:
        """Writes the file, whole or not at all."""
        self.courses[course.hook] = course
        document = {
            "about": about | describe_machine(),
            "courses": [asdict(self.courses[hook]) for hook in sorted(self.courses)],
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(document, indent=1) + "\n")
        new.replace(self._path)


def _course(points: list[dict[str, Any]], **others: Any) -> Course:
    return Course(points=[TrainingPoint(**point) for point in points], **others)
