"""Makes the rows of a comparison from what was measured, and from predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from commhooks.comm.wire import all_reduce_bytes
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.experiment import Experiment
from commhooks.lab.comparison.result import (
    LOOPBACK,
    Comparison,
    ComparisonError,
    Failure,
    Row,
)
from commhooks.lab.comparison.setting import Figures, Setting
from commhooks.lab.machine import cores, describe_machine
from commhooks.lab.simulation import Link, Measurements, Network, Study
from commhooks.lab.units import format_rate

__all__ = ["Report"]

_LINK = Link(1e9, latency_seconds=20e-6)  # of any rate; the latency is the default of simulate


@dataclass(frozen=True)
class Report:
    """Makes rows for the settings of ``experiment``."""

    experiment: Experiment
    gradient_bytes: int

    def comparison(self, links: Sequence[float], *, complete: bool) -> Comparison:
        """Return the whole result. Arguments as in :meth:`rows`."""
        experiment = self.experiment
        rows = self.rows(links, complete=complete)
        return Comparison(
            str(experiment.workload.model),
            experiment.world_size,
            experiment.steps,
            describe_machine(),
            tuple(experiment.notes),
            rows,
            tuple(experiment.pairs),
            tuple(experiment.failures) + self._unpredicted(rows),
        )

    def rows(self, links: Sequence[float], *, complete: bool) -> tuple[Row, ...]:
        """Return the rows of the first setting and of each link, predicted if not measured.

        Unless ``complete``, what can be neither measured nor predicted is left out.
        """
        if not self.experiment.settings:
            return ()
        first = self.experiment.settings[0]
        rows = self._measured(first)
        of_links = {setting.bits_per_second: setting for setting in self.experiment.settings[1:]}
        for rate in links:
            found = self._measured(of_links[rate]) if rate in of_links else []
            if not found and (complete or self._study is not None):
                found = self._predicted(rate)
            rows += found
        return tuple(rows)

    def _measured(self, setting: Setting) -> list[Row]:
        figures = {
            entry.name: found
            for entry in self.experiment.entries
            if (found := setting.figures(entry.name)) is not None
        }
        if TORCH.name not in figures:
            return []  # interrupted
        seconds = {name: found.step_seconds for name, found in figures.items()}
        return [
            replace(
                self._row(entry, setting.bits_per_second, seconds),
                link=setting.name,
                measured=True,
                step_spread_seconds=found.step_spread_seconds,
                exposed_seconds=found.exposed_seconds,
                waited_seconds=found.costs.exposed_seconds,
                training=tuple(setting.training.get(entry.name, ())),
            )
            for entry in self.experiment.entries
            if (found := figures.get(entry.name)) is not None
        ]

    def _predicted(self, rate: float) -> list[Row]:
        """Return rows with the training of the first setting, at the predicted times."""
        entries = [entry for entry in self._working if not self._reason(entry)]
        seconds = {entry.name: self._step_seconds(entry, rate) for entry in entries}
        rows = []
        for entry in entries:
            points = self._first.training.get(entry.name, ())
            training = tuple(replace(p, seconds=p.step * seconds[entry.name]) for p in points)
            rows.append(replace(self._row(entry, rate, seconds), training=training))
        return rows

    def _unpredicted(self, rows: Sequence[Row]) -> tuple[Failure, ...]:
        """Return the failures of hooks that cannot be predicted, if links are."""
        link = next(
            (row.link for row in rows if row.link != rows[0].link and not row.measured), None
        )
        return tuple(
            Failure(entry.name, link, reason)
            for entry in self._working
            if link is not None and (reason := self._reason(entry))
        )

    def _reason(self, entry: Entry) -> str | None:
        """Return why an entry cannot be predicted, or None if it can."""
        found, config = self.experiment.dry_runs, entry.simulated_config
        if config is None or not isinstance(found, Measurements):
            return None
        return found.reason(config)

    def _row(self, entry: Entry, rate: float | None, seconds: Mapping[str, float]) -> Row:
        """Return a row as it is if nothing is measured. ``rate`` is None for the first setting."""
        bare = self._local(BARE).step_seconds
        first_steps = self._first.first_steps[entry.name]
        wire_bytes = self._local(entry).costs.wire_bytes
        return Row(
            hook=entry.name,
            link=LOOPBACK if rate is None else format_rate(rate),
            bits_per_second=rate,
            measured=False,
            step_seconds=seconds[entry.name],
            step_spread_seconds=None,
            to_torch=seconds[entry.name] / seconds[TORCH.name],
            exposed_seconds=seconds[entry.name] - bare,
            waited_seconds=None,
            floor_seconds=None if rate is None else 8 * wire_bytes / rate + bare,
            predicted_seconds=(
                self._step_seconds(entry, rate) if rate and self._is_simulated(entry) else None
            ),
            gradient_bytes=self.gradient_bytes,
            wire_bytes=wire_bytes,
            ratio=self._plain_bytes / wire_bytes if wire_bytes else None,
            error=first_steps.error,
            peak_bytes=first_steps.peak_bytes,
            break_even_bits_per_second=self._break_even(entry),
        )

    @property
    def _working(self) -> list[Entry]:
        failed = {failure.hook for failure in self.experiment.failures}
        return [entry for entry in self.experiment.entries if entry.name not in failed]

    @property
    def _first(self) -> Setting:
        return self.experiment.settings[0]

    def _local(self, entry: Entry) -> Figures:
        """Return the figures of the first setting."""
        found = self._first.figures(entry.name)
        assert found is not None
        return found

    @property
    def _plain_bytes(self) -> int:
        return all_reduce_bytes(self.gradient_bytes, self.experiment.world_size)

    @cached_property
    def _study(self) -> Study | None:
        """The entries over links of any rate, one link for each rank."""
        found, size = self.experiment.dry_runs, self.experiment.world_size
        if not isinstance(found, Measurements):
            return None
        measured = [e for e in self.experiment.entries if self._first.figures(e.name)]
        return Study(
            hooks={
                entry.name: found.of(config)
                for entry in measured
                if (config := entry.simulated_config) and config in found
            },
            network=Network(size, _LINK, _LINK),
            backend=found.gloo,
            cores=cores() / size,
            baseline=TORCH.name,
            loopback_seconds={entry.name: self._local(entry).step_seconds for entry in measured},
        )

    def _is_simulated(self, entry: Entry) -> bool:
        return self._study is not None and (entry == BARE or entry.name in self._study.hooks)

    def _break_even(self, entry: Entry) -> float | None:
        if self._study is None or entry in (BARE, TORCH) or not self._is_simulated(entry):
            return None
        rates = self._study.break_even(entry.name)
        return rates.below if rates else 0.0

    def _step_seconds(self, entry: Entry, rate: float) -> float:
        """Predict a step over links of this rate."""
        if self._study is None:
            raise ComparisonError(
                f"{format_rate(rate)} can be neither measured nor predicted: "
                f"{self.experiment.dry_runs}"
            )
        if entry == BARE:
            return self._local(BARE).step_seconds
        return self._study.step_seconds(entry.name, rate)
