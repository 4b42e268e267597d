"""Who meets in a comparison, and what is measured at each place."""

import math
from dataclasses import dataclass, field

from commhooks.cluster import Ranks
from commhooks.cluster import links as shaped
from commhooks.errors import CommHookError
from commhooks.lab.comparison import remote as ring
from commhooks.lab.comparison.entry import BARE, Contender
from commhooks.lab.comparison.prediction import config_of
from commhooks.lab.comparison.remote import Entry
from commhooks.lab.comparison.result import LOOPBACK, TrainingPoint
from commhooks.lab.comparison.setting import (
    ComparisonError,
    Figures,
    Progress,
    enter_all,
    time_all,
    train_all,
)
from commhooks.lab.comparison.trial import FIRST_STEP
from commhooks.lab.machine import cores
from commhooks.lab.models import Subject
from commhooks.lab.simulation import Measurements, measure
from commhooks.lab.simulation import Subject as SimulatedSubject
from commhooks.lab.units import format_rate

__all__ = ["Event", "Outcome"]

_ROUNDINGS = 100  # errors of so many times the precision are taken for rounding

Courses = dict[str, tuple[TrainingPoint, ...]]


@dataclass(frozen=True)
class Outcome:
    """What was measured at one place, by names of contenders."""

    figures: dict[str, Figures]
    courses: Courses
    # Over loopback only:
    entries: dict[str, Entry] = field(default_factory=dict)
    rehearsed: Measurements | CommHookError | None = None
    """What predictions are made of, or why there can be none."""


@dataclass(frozen=True)
class Event:
    """Who meets, and for how long."""

    subject: Subject
    entrants: list[Contender]
    world_size: int
    steps: int
    train: str | None
    train_steps: int
    progress: Progress

    def over_loopback(self, exact: set[str], precision: float, *, trains: bool) -> Outcome:
        """``exact``: who is held to the exact mean. With the errors of all."""
        with Ranks(self.world_size, threads=self._threads) as ranks:
            tell = self._telling(LOOPBACK)
            entries = enter_all(ranks, self.subject, self.entrants, tell, verify=True)
            _verify(entries, exact, _ROUNDINGS * precision)
            figures = time_all(ranks, self.entrants, self.steps, tell)
            courses = self._courses(ranks, tell) if trains else {}
            tell("rehearsing", 0, 1)
            return Outcome(figures, courses, entries, self._rehearse(ranks))

    def over_link(self, rate: float) -> Outcome:
        """Raises LinkError where it cannot be made."""
        with (
            shaped.shaped_link(self.world_size, rate) as link,
            Ranks(self.world_size, link, threads=self._threads) as ranks,
        ):
            tell = self._telling(format_rate(rate))
            enter_all(ranks, self.subject, self.entrants, tell, verify=False)
            figures = time_all(ranks, self.entrants, self.steps, tell)
            return Outcome(figures, self._courses(ranks, tell))

    def _rehearse(self, ranks: Ranks) -> Measurements | CommHookError:
        """Of no more use are ``ranks`` then."""
        ranks(ring.close_ring)
        configs = [config for who in self.entrants if (config := config_of(who)) is not None]
        size = self.world_size
        subject = SimulatedSubject(
            self.subject.model, self.subject.input, ranks_per_machine=size, first_step=FIRST_STEP
        )
        try:
            return measure(subject, configs, [size], ranks)
        except CommHookError as error:
            return error

    def _courses(self, ranks: Ranks, tell: Progress) -> Courses:
        if self.train is None:
            return {}
        who = [entrant for entrant in self.entrants if entrant != BARE]
        return train_all(ranks, who, self.train, self.train_steps, tell)

    def _telling(self, where: str) -> Progress:
        return lambda what, done, of: self.progress(f"{where}: {what}", done, of)

    @property
    def _threads(self) -> int:
        return max(1, cores() // self.world_size)


def _verify(entries: dict[str, Entry], exact: set[str], rounding: float) -> None:
    for name, entry in entries.items():
        error = entry.error
        if error is None:
            continue
        if not math.isfinite(error):
            raise ComparisonError(
                f"{name!r}: the gradients of a step are not finite, or their mean is zero or not "
                "finite; nothing was timed"
            )
        if name in exact and error > rounding:
            raise ComparisonError(
                f"{name!r}: expected the exact mean to within rounding ({rounding:.1e}), found "
                f"gradients that are off by {error:.1e}; nothing was timed. Is the model's "
                "gradient the same in each run with the same torch.manual_seed()?"
            )
