"""Makes rows of what was measured, and of what is predicted from it."""

from dataclasses import dataclass, replace
from functools import cached_property

from commhooks.comm.wire import all_reduce_bytes
from commhooks.lab.comparison.entry import BARE, TORCH, Contender
from commhooks.lab.comparison.experiment import Event, Outcome
from commhooks.lab.comparison.prediction import Predictor
from commhooks.lab.comparison.result import LOOPBACK, Row, TrainingPoint
from commhooks.lab.comparison.setting import ComparisonError
from commhooks.lab.simulation import Measurements
from commhooks.lab.units import format_rate

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """Makes rows of what was measured."""

    event: Event
    loopback: Outcome
    gradient_bytes: int

    def rows(self, rate: float | None, there: Outcome | None) -> list[Row]:
        """Of one place; None for loopback's rate, and for an outcome that is to be predicted."""
        entrants = self.event.entrants
        steps = {
            who.name: there.figures[who.name].step_seconds if there else self._step_over(rate, who)
            for who in entrants
        }
        return [self._row(who, rate, there, steps) for who in entrants]

    def _row(
        self, who: Contender, rate: float | None, there: Outcome | None, steps: dict[str, float]
    ) -> Row:
        name, predictor = who.name, self._predictor
        local = self.loopback.figures[name]
        figures = there.figures[name] if there else None
        wire_bytes = (figures or local).costs.wire_bytes
        bare = self.loopback.figures[BARE.name].step_seconds
        return Row(
            hook=name,
            link=LOOPBACK if rate is None else format_rate(rate),
            bits_per_second=rate,
            measured=figures is not None,
            step_seconds=steps[name],
            step_spread_seconds=figures.step_spread_seconds if figures else None,
            to_torch=steps[name] / steps[TORCH.name],
            exposed_seconds=figures.exposed_seconds if figures else steps[name] - bare,
            waited_seconds=figures.costs.exposed_seconds if figures else None,
            floor_seconds=None if rate is None else 8 * wire_bytes / rate + bare,
            predicted_seconds=predictor.step_seconds(who, rate) if predictor and rate else None,
            gradient_bytes=self.gradient_bytes,
            wire_bytes=wire_bytes,
            ratio=self._plain_bytes / wire_bytes if wire_bytes else None,
            error=self.loopback.entries[name].error,
            peak_bytes=self.loopback.entries[name].peak_bytes,
            break_even_bits_per_second=self._break_even(who),
            training=self._course(name, there, steps[name]),
        )

    @property
    def _plain_bytes(self) -> int:
        return all_reduce_bytes(self.gradient_bytes, self.event.world_size)

    @cached_property
    def _predictor(self) -> Predictor | None:
        rehearsed = self.loopback.rehearsed
        if not isinstance(rehearsed, Measurements):
            return None
        figures = self.loopback.figures.items()
        seconds = {name: of_one.step_seconds for name, of_one in figures}
        return Predictor(rehearsed, self.event.world_size, seconds)

    def _break_even(self, who: Contender) -> float | None:
        if self._predictor is None or who in (BARE, TORCH):
            return None
        rates = self._predictor.pays(who)
        return rates.below if rates else 0.0

    def _step_over(self, rate: float | None, who: Contender) -> float:
        assert rate is not None
        if self._predictor is None:
            raise ComparisonError(
                f"{format_rate(rate)} can be neither measured nor predicted: "
                f"{self.loopback.rehearsed}"
            )
        return self._predictor.step_seconds(who, rate)

    def _course(
        self, name: str, there: Outcome | None, step_seconds: float
    ) -> tuple[TrainingPoint, ...]:
        """Loss and bytes do not depend on the link; predicted seconds are those of all steps."""
        if there is not None:
            return there.courses.get(name, ())
        points = self.loopback.courses.get(name, ())
        return tuple(replace(point, seconds=point.step * step_seconds) for point in points)
