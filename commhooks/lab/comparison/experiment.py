"""What is measured in a comparison, setting by setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from commhooks.cluster import Ranks
from commhooks.cluster import links as shaped
from commhooks.errors import CommHookError, reason_of
from commhooks.lab.comparison import remote
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.hosts import measure_pairs, pairs_of_hosts
from commhooks.lab.comparison.plan import Task, timing_tasks, training_tasks, verifying_tasks
from commhooks.lab.comparison.progress import Progress, ProgressCallback
from commhooks.lab.comparison.result import HOSTS, LOOPBACK, ComparisonError, Failure, HostPair
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
    timeout: float
    """In seconds, of the steps of one entry that are run together."""
    settings: list[Setting] = field(default_factory=list)
    """In the order in which they were measured; the first one is verified."""
    dry_runs: Measurements | Exception | None = None
    """What predictions are based on, or the reason why there are none."""
    notes: list[str] = field(default_factory=list)
    pairs: list[HostPair] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def run(self, links: Sequence[float], callback: ProgressCallback) -> None:
        """Measure over loopback and over links of these rates."""
        plan = {LOOPBACK: self._tasks(is_first=True, trains=not links)}
        plan |= {format_rate(rate): self._tasks(is_first=False, trains=True) for rate in links}
        progress = Progress(callback, plan)
        with Ranks(self.world_size, threads=self._threads, timeout=self.timeout) as ranks:
            self.measure(Setting(LOOPBACK), ranks, plan[LOOPBACK], progress)
            progress.tell(LOOPBACK, "running hooks dry")
            self.dry_runs = self._dry_run(ranks)
        for rate in links:
            setting = Setting(format_rate(rate), rate)
            try:
                with (
                    shaped.shaped_link(self.world_size, rate) as link,
                    Ranks(
                        self.world_size, link, threads=self._threads, timeout=self.timeout
                    ) as ranks,
                ):
                    self.measure(setting, ranks, plan[setting.name], progress)
            except shaped.LinkError as error:
                progress.drop(setting.name)
                self.notes.append(f"{setting.name} is predicted, not measured: {error}")

    def run_on_hosts(self, ranks: RankCaller, callback: ProgressCallback) -> None:
        """Measure the network between the hosts of ``ranks``, and the entries over it."""
        plan = {HOSTS: self._tasks(is_first=True, trains=True)}
        progress = Progress(callback, plan)
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
        """Begin a setting and do its tasks, see :meth:`do`."""
        progress.tell(setting.name, "preparing")
        self.begin(setting, ranks)
        self.do(setting, ranks, tasks, progress)

    def begin(self, setting: Setting, ranks: RankCaller) -> None:
        """Prepare ranks for the tasks of a setting."""
        ranks(remote.prepare, self.workload)
        self.settings.append(setting)

    def do(
        self, setting: Setting, ranks: RankCaller, tasks: list[Task], progress: Progress
    ) -> None:
        """Do tasks of a setting. If a hook fails, the other entries go on without it.

        Raises ComparisonError if the bare model or torch DDP fails.
        """
        for task in tasks:
            name = task.entry.name
            if any(failure.hook == name for failure in self.failures):
                continue
            progress.tell(setting.name, f"{task.kind} {name}")
            try:
                setting.run(ranks, task, self.train or "")
                self._check(setting, task)
            except Exception as error:
                details = "\n".join(getattr(error, "__notes__", ()))
                if task.entry in (BARE, TORCH):
                    shown = "" if isinstance(error, CommHookError) else f"\n{details}"
                    raise ComparisonError(
                        f"{name!r} failed: {type(error).__name__}: {error}{shown}"
                    ) from error
                setting.forget(task)
                progress.drop(name)
                self.failures.append(
                    Failure(name, setting.name, reason_of(error), f"{error}\n{details}")
                )
                ranks.restart()
                ranks(remote.prepare, self.workload)
            else:
                progress.end(setting.name, task)

    def _tasks(self, *, is_first: bool, trains: bool) -> list[Task]:
        tasks = verifying_tasks(self.entries) if is_first else []
        tasks += timing_tasks(self.entries, self.steps)
        if trains and self.train is not None:
            tasks += training_tasks(self.entries, self.train_steps)
        return tasks

    def _dry_run(self, ranks: Ranks) -> Measurements | Exception:
        """Measure what predictions need. If it fails, ``ranks`` cannot be used any more."""
        ranks(remote.clear)
        failed = {failure.hook for failure in self.failures}
        entries = [entry for entry in self.entries if entry.name not in failed]
        configs = [config for entry in entries if (config := entry.simulated_config)]
        size, workload = self.world_size, self.workload
        job = Job(workload.model, workload.input, ranks_per_machine=size, first_step=FIRST_STEP)
        try:
            found = measure(job, configs, [size], ranks)
        except Exception as error:
            self.notes.append(f"nothing is predicted: {reason_of(error)}")
            return error
        for entry in entries:
            if entry.simulated_config and (reason := found.reason(entry.simulated_config)):
                self.notes.append(f"{entry.name} is not predicted: {reason}")
        return found

    @property
    def _threads(self) -> int:
        return max(1, cores() // self.world_size)

    def _check(self, setting: Setting, task: Task) -> None:
        """Raise CommHookError if what a task has measured shows that its entry does not work."""
        name = task.entry.name
        if task.kind == "training":
            last = setting.training[name][-1]
            if task.entry != TORCH and not math.isfinite(last.validation_loss):
                raise CommHookError(
                    f"training diverged: expected a finite validation loss, found "
                    f"{last.validation_loss} after {last.step} steps"
                )
        error = setting.first_steps[name].error if task.kind == "verifying" else None
        if error is None:
            return
        if not math.isfinite(error):
            raise CommHookError(
                "the gradients of a step are not finite, or their mean is zero or not finite"
            )
        rounding = _ROUNDINGS * self.precision
        if name in self.exact and error > rounding:
            raise CommHookError(
                f"expected the exact mean to within rounding ({rounding:.1e}), found gradients "
                f"with a relative error of {error:.1e}. Is the model's gradient the same in each "
                "run with the same torch.manual_seed()?"
            )
