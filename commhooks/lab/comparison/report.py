"""Makes the rows of a comparison from what was measured, and from predictions."""

from dataclasses import dataclass, replace
from functools import cached_property

from commhooks.comm.wire import all_reduce_bytes
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.experiment import Experiment, Measured
from commhooks.lab.comparison.result import LOOPBACK, ComparisonError, Row, TrainingPoint
from commhooks.lab.machine import cores
from commhooks.lab.simulation import Link, Measurements, Network, Study
from commhooks.lab.units import format_rate

__all__ = ["Report"]

_LINK = Link(1e9, latency_seconds=20e-6)  # of any rate; the latency is the default of simulate


@dataclass(frozen=True)
class Report:
    """Makes rows for the settings of ``experiment``, given what was measured over loopback."""

    experiment: Experiment
    loopback: Measured
    gradient_bytes: int

    def rows(self, rate: float | None, measured: Measured | None) -> list[Row]:
        """Return the rows of one setting, predicted if ``measured`` is None.

        ``rate`` is None for loopback.
        """
        entries = self.experiment.entries
        seconds = {
            entry.name: measured.figures[entry.name].step_seconds
            if measured
            else self._step_seconds(entry, rate)
            for entry in entries
        }
        return [self._row(entry, rate, measured, seconds) for entry in entries]

    def _row(
        self, entry: Entry, rate: float | None, measured: Measured | None, seconds: dict[str, float]
    ) -> Row:
        name = entry.name
        local = self.loopback.figures[name]
        first_steps = self.loopback.first_steps[name]
        figures = measured.figures[name] if measured else None
        wire_bytes = (figures or local).costs.wire_bytes
        bare = self.loopback.figures[BARE.name].step_seconds
        return Row(
            hook=name,
            link=LOOPBACK if rate is None else format_rate(rate),
            bits_per_second=rate,
            measured=figures is not None,
            step_seconds=seconds[name],
            step_spread_seconds=figures.step_spread_seconds if figures else None,
            to_torch=seconds[name] / seconds[TORCH.name],
            exposed_seconds=figures.exposed_seconds if figures else seconds[name] - bare,
            waited_seconds=figures.costs.exposed_seconds if figures else None,
            floor_seconds=None if rate is None else 8 * wire_bytes / rate + bare,
            predicted_seconds=self._step_seconds(entry, rate) if self._study and rate else None,
            gradient_bytes=self.gradient_bytes,
            wire_bytes=wire_bytes,
            ratio=self._plain_bytes / wire_bytes if wire_bytes else None,
            error=first_steps.error,
            peak_bytes=first_steps.peak_bytes,
            break_even_bits_per_second=self._break_even(entry),
            training=self._training(name, measured, seconds[name]),
        )

    @property
    def _plain_bytes(self) -> int:
        return all_reduce_bytes(self.gradient_bytes, self.experiment.world_size)

    @cached_property
    def _study(self) -> Study | None:
        """The entries over links of any rate, one link for each rank."""
        found, size = self.loopback.dry_runs, self.experiment.world_size
        if not isinstance(found, Measurements):
            return None
        return Study(
            hooks={
                entry.name: found.of(config)
                for entry in self.experiment.entries
                if (config := entry.simulated_config)
            },
            network=Network(size, _LINK, _LINK),
            backend=found.gloo,
            cores=cores() / size,
            baseline=TORCH.name,
            loopback_seconds={
                name: figures.step_seconds for name, figures in self.loopback.figures.items()
            },
        )

    def _break_even(self, entry: Entry) -> float | None:
        if self._study is None or entry in (BARE, TORCH):
            return None
        rates = self._study.break_even(entry.name)
        return rates.below if rates else 0.0

    def _step_seconds(self, entry: Entry, rate: float | None) -> float:
        """Predict a step over links of this rate."""
        assert rate is not None
        if self._study is None:
            raise ComparisonError(
                f"{format_rate(rate)} can be neither measured nor predicted: "
                f"{self.loopback.dry_runs}"
            )
        if entry == BARE:
            return self.loopback.figures[BARE.name].step_seconds
        return self._study.step_seconds(entry.name, rate)

    def _training(
        self, name: str, measured: Measured | None, step_seconds: float
    ) -> tuple[TrainingPoint, ...]:
        """Return the training points; if they are predicted, only the seconds change."""
        if measured is not None:
            return measured.training.get(name, ())
        points = self.loopback.training.get(name, ())
        return tuple(replace(point, seconds=point.step * step_seconds) for point in points)
