"""Training over a slow link: what ``python -m bench.slow_link`` writes."""

from __future__ import annotations

import statistics
from typing import Any

from bench.results_page.kind import Document, Kind, Section, number, table
from bench.results_page.plots import bars, curves
from bench.slow_link.hooks import PLAIN
from bench.slow_link.record import Course, courses_of
from commhooks.lab.comparison import TrainingPoint
from commhooks.lab.units import format_rate

__all__ = ["SLOW_LINKS"]

_HEADER = [
    "hook",
    "step",
    "sent per step",
    "at the link's rate",
    "at plain's loss after",
    "of plain's time",
    "last step",
    "loss there",
    "bare step",
]


def _render(stem: str, document: Document) -> Section:
    courses = courses_of(document)
    plain = courses[PLAIN].lowest
    rate = document["about"]["bits_per_second"]
    rows = sorted(
        (_Row(course, plain, rate) for course in courses.values()), key=lambda row: row.sort_key
    )
    section = Section([_about(document["about"], courses, plain), ""])
    section.add_plot(
        f"{stem}-losses.svg",
        "validation loss against training time",
        curves(
            "Validation loss against training time",
            {row.name: row.curve for row in rows},
            "training time in seconds",
            "validation loss, nats per byte",
        ),
    )
    shares = {row.name: row.share for row in rows if row.share is not None}
    section.add_plot(
        f"{stem}-times.svg",
        "time to the loss of plain averaging, over the time that it takes",
        bars("time to plain averaging's loss", shares, "over plain averaging's", log=True),
    )
    section.lines += table(_HEADER, [row.cells() for row in rows])
    return section


def _about(about: dict[str, Any], courses: dict[str, Course], plain: TrainingPoint) -> str:
    bare = [seconds for course in courses.values() for seconds in course.bare_step_seconds]
    return (
        f"{about['parameters'] / 1e6:.1f} million parameters, {about['ranks']} ranks on "
        f"{about['cpu']}, {about['cores']} cores, {format_rate(about['bits_per_second'])}, torch "
        f"{about['torch']}. Plain averaging reached its lowest validation loss, "
        f"{plain.validation_loss:.4f}, after {plain.step} steps and {plain.seconds:.0f} s. A hook "
        "without a time did not get there before it was stopped. A training step of each rank "
        f"alone took {number('seconds', min(bare))} to {number('seconds', max(bare))}, median "
        f"{number('seconds', statistics.median(bare))}, before and after the trainings."
    )


class _Row:
    """What the page says of one hook."""

    def __init__(self, course: Course, plain: TrainingPoint, bits_per_second: float) -> None:
        self.name = course.hook
        self._course = course
        self._bits_per_second = bits_per_second
        self._arrival = course.first_at(plain.validation_loss)
        self.share = self._arrival.seconds / plain.seconds if self._arrival else None

    @property
    def curve(self) -> list[tuple[float, float]]:
        return [(point.seconds, point.validation_loss) for point in self._course.points]

    @property
    def sort_key(self) -> tuple[bool, float]:
        """The fastest first, then by how far they came."""
        last = self._course.points[-1].validation_loss
        return self.share is None, last if self.share is None else self.share

    def cells(self) -> list[str]:
        last = self._course.points[-1]
        arrival = self._arrival
        step_bytes = last.wire_bytes / last.step
        return [
            f"`{self.name}`".replace("|", "\\|"),
            number("seconds", last.seconds / last.step),
            number("bytes", step_bytes),
            number("seconds", 8 * step_bytes / self._bits_per_second),
            f"{arrival.seconds:.1f} s, {arrival.step} steps" if arrival else "",
            f"{self.share:.3f}" if self.share is not None else "",
            str(last.step),
            f"{last.validation_loss:.4f}",
            ", ".join(number("seconds", seconds) for seconds in self._course.bare_step_seconds),
        ]


SLOW_LINKS = Kind("bench.slow_link", lambda document: "courses" in document, _render)
