"""What is measured in a comparison, setting by setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from commhooks.cluster import Ranks
from commhooks.cluster import links as shaped
from commhooks.errors import CommHookError
from commhooks.lab.comparison import remote
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.hosts import measure_pairs, pairs_of_hosts
from commhooks.lab.comparison.plan import Task, timing_tasks, training_tasks, verifying_tasks
from commhooks.lab.comparison.progress import Progress, ProgressCallback
from commhooks.lab.comparison.result import HOSTS, LOOPBACK, ComparisonError, HostPair
from commhooks.lab.comparison.setting import RankCaller, Setting
from commhooks.lab.comparison.trial import FIRST_STEP
from commhooks.lab.machine import cores
from commhooks.lab.models import Workload
from commhooks.lab.simulation import Job, Measurements, measure
from commhooks.lab.units import format_rate

__all__ = ["Experiment"]

_ROUNDINGS = 100  # an error of up to this many units of precision counts as rounding


@dataclass
class Experiment:
    """The entries of a comparison, how long each is measured, and what has been measured so far.

    The entries named in ``exact`` must return the exact mean, within rounding of ``precision``.
    """

    workload: Workload
    entries: list[Entry]
    world_size: int
    steps: int
    train: str | None
    train_steps: int
    exact: set[str]
    precision: float
    settings: list[Setting] = field(default_factory=list)
    """In the order in which they were measured; the first one is verified."""
    dry_runs: Measurements | CommHookError | None = None
    """What predictions are based on, or the reason why there are none."""
    notes: list[str] = field(default_factory=list)
    pairs: list[HostPair] = field(default_factory=list)

    def run(self, links: Sequence[float], callback: ProgressCallback) -> None:
        """Measure over loopback and over links of these rates."""
        plan = {LOOPBACK: self._tasks(is_first=True, trains=not links)}
        plan |= {format_rate(rate): self._tasks(is_first=False, trains=True) for rate in links}
        progress = Progress(callback, plan, {format_rate(rate): rate for rate in links})
        with Ranks(self.world_size, threads=self._threads) as ranks:
            self.measure(Setting(LOOPBACK), ranks, plan[LOOPBACK], progress)
            progress.tell(LOOPBACK, "running hooks dry")
            self.dry_runs = self._dry_run(ranks)
        if isinstance(self.dry_runs, CommHookError):
            self.notes.append(f"nothing is predicted: {self.dry_runs}")
        for rate in links:
            setting = Setting(format_rate(rate), rate)
            try:
                with (
                    shaped.shaped_link(self.world_size, rate) as link,
                    Ranks(self.world_size, link, threads=self._threads) as ranks,
                ):
                    self.measure(setting, ranks, plan[setting.name], progress)
            except shaped.LinkError as error:
                progress.drop(setting.name)
                self.notes.append(f"{setting.name} is predicted, not measured: {error}")

    def run_on_hosts(self, ranks: RankCaller, callback: ProgressCallback) -> None:
        """Measure the network between the hosts of ``ranks``, and the entries over it."""
        plan = {HOSTS: self._tasks(is_first=True, trains=True)}
        progress = Progress(callback, plan, {})
        pairs = pairs_of_hosts(ranks)
        for index, pair in enumerate(measure_pairs(ranks, pairs)):
            self.pairs.append(pair)
            progress.tell(HOSTS, f"pair {index + 1} of {len(pairs)} measured")
        if not pairs:
            self.notes.append("all ranks are on one host, so there was no network to measure")
        self.measure(Setting(HOSTS), ranks, plan[HOSTS], progress)

    def measure(
        self, setting: Setting, ranks: RankCaller, tasks: list[Task], progress: Progress
    ) -> None:
        """Do the tasks of a setting. All entries of the first setting are verified first."""
        progress.tell(setting.name, "preparing")
        ranks(remote.prepare, self.workload)
        self.settings.append(setting)
        verifying = [task for task in tasks if task.kind == "verifying"]
        setting.run(ranks, verifying, "", progress)
        self._verify(setting)
        setting.run(ranks, tasks[len(verifying) :], self.train or "", progress)

    def _tasks(self, *, is_first: bool, trains: bool) -> list[Task]:
        tasks = verifying_tasks(self.entries) if is_first else []
        tasks += timing_tasks(self.entries, self.steps)
        if trains and self.train is not None:
            tasks += training_tasks(self.entries, self.train_steps)
        return tasks

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

    def _verify(self, setting: Setting) -> None:
        rounding = _ROUNDINGS * self.precision
        for name, first in setting.first_steps.items():
            error = first.error
            if error is None:
                continue
            if not math.isfinite(error):
                raise ComparisonError(
                    f"{name!r}: the gradients of a step are not finite, or their mean is zero or "
                    "not finite; nothing was timed"
                )
            if name in self.exact and error > rounding:
                raise ComparisonError(
                    f"{name!r}: expected the exact mean to within rounding ({rounding:.1e}), found "
                    f"gradients with a relative error of {error:.1e}; nothing was timed. Is the "
                    "model's gradient the same in each run with the same torch.manual_seed()?"
                )
