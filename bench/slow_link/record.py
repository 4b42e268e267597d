"""The measured trainings, in a file that grows hook by hook."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commhooks.lab.comparison import TrainingPoint
from commhooks.lab.machine import describe_machine

__all__ = ["PLAIN", "Course", "Record", "courses_of"]

PLAIN = "allreduce"
"""The hook that all others are compared with."""


@dataclass(frozen=True)
class Course:
    """The training with one hook, which :func:`commhooks.hook.spec.hook_spec` can read.

    ``bare_step_seconds``: time of a training step on each rank alone, just before and just after.
    It shows whether the machine was equally fast for all hooks. ``load``: its load average, at the
    same times.
    """

    hook: str
    points: list[TrainingPoint]
    bare_step_seconds: tuple[float, float]
    load: tuple[float, float]

    @property
    def lowest(self) -> TrainingPoint:
        """Return the point with the lowest validation loss."""
        return min(self.points, key=lambda point: point.validation_loss)

    def first_at(self, loss: float) -> TrainingPoint | None:
        """Return the first point with at most this validation loss, or None."""
        return next((point for point in self.points if point.validation_loss <= loss), None)


def courses_of(document: dict[str, Any]) -> dict[str, Course]:
    """Read the courses of a JSON document, by hook."""
    return {entry["hook"]: _course(**entry) for entry in document["courses"]}


class Record:
    """The courses of a JSON file, ``{"about": {...}, "courses": [...]}``, by hook."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.courses = courses_of(json.loads(path.read_text())) if path.exists() else {}

    def add(self, course: Course, about: dict[str, object]) -> None:
        """Add a course and write the file, all of it or nothing."""
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
