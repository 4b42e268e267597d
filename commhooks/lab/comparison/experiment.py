"""What is measured in a comparison, in each of its settings."""

import math
from dataclasses import dataclass, field

from commhooks.cluster import Ranks
from commhooks.cluster import links as shaped
from commhooks.errors import CommHookError
from commhooks.lab.comparison import remote
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.remote import FirstSteps
from commhooks.lab.comparison.result import LOOPBACK, ComparisonError, TrainingPoint
from commhooks.lab.comparison.setting import Figures, ProgressCallback, Setting
from commhooks.lab.comparison.trial import FIRST_STEP
from commhooks.lab.machine import cores
from commhooks.lab.models import Workload
from commhooks.lab.simulation import Job, Measurements, measure
from commhooks.lab.units import format_rate

__all__ = ["Experiment", "Measured"]

_ROUNDINGS = 100  # an error of up to this many units of precision counts as rounding

Training = dict[str, tuple[TrainingPoint, ...]]


@dataclass(frozen=True)
class Measured:
    """What was measured in one setting, by the names of entries."""

    figures: dict[str, Figures]
    training: Training
    # Over loopback only:
    first_steps: dict[str, FirstSteps] = field(default_factory=dict)
    dry_runs: Measurements | CommHookError | None = None
    """What predictions are based on, or the reason why there are none."""


@dataclass(frozen=True)
class Experiment:
    """The entries of a comparison, and how long each is measured."""

    workload: Workload
    entries: list[Entry]
    world_size: int
    steps: int
    train: str | None
    train_steps: int
    progress: ProgressCallback

    def over_loopback(self, exact: set[str], precision: float, *, trains: bool) -> Measured:
        """Verify and measure over loopback, and run the hooks dry.

        The entries named in ``exact`` must return the exact mean, within rounding of ``precision``.
        """
        with Ranks(self.world_size, threads=self._threads) as ranks:
            setting = Setting(ranks, LOOPBACK, self.entries, self.progress)
            first_steps = setting.prepare(self.workload, verify=True)
            _verify(first_steps, exact, _ROUNDINGS * precision)
            figures = setting.time(self.steps)
            training = self._train(setting) if trains else {}
            self.progress(f"{LOOPBACK}: running hooks dry", 0, 1)
            return Measured(figures, training, first_steps, self._dry_run(ranks))

    def over_link(self, rate: float) -> Measured:
        """Measure over a shaped link. Raises LinkError if the link cannot be made."""
        with (
            shaped.shaped_link(self.world_size, rate) as link,
            Ranks(self.world_size, link, threads=self._threads) as ranks,
        ):
            setting = Setting(ranks, format_rate(rate), self.entries, self.progress)
            setting.prepare(self.workload, verify=False)
            return Measured(setting.time(self.steps), self._train(setting))

    def _train(self, setting: Setting) -> Training:
        return setting.train(self.train, self.train_steps) if self.train is not None else {}

    def _dry_run(self, ranks: Ranks) -> Measurements | CommHookError:
        """Measure what predictions need. If it fails, ``ranks`` cannot be used any more."""
        ranks(remote.clear)
        configs = [config for entry in self.entries if (config := entry.simulated_config)]
        size, workload = self.world_size, self.workload
        job = Job(workload.model, workload.input, ranks_per_machine=size, first_step=FIRST_STEP)
        try:
            return measure(job, configs, [size], ranks)
        except CommHookError as error:
            return error

    @property
    def _threads(self) -> int:
        return max(1, cores() // self.world_size)


def _verify(first_steps: dict[str, FirstSteps], exact: set[str], rounding: float) -> None:
    for name, first in first_steps.items():
        error = first.error
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
                f"gradients with a relative error of {error:.1e}; nothing was timed. Is the "
                "model's gradient the same in each run with the same torch.manual_seed()?"
            )
