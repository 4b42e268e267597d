"""Measure the entries of a comparison, setting by setting: over loopback, links, or between hosts.

Note [Blocks of steps]
~~~~~~~~~~~~~~~~~~~~~~
Each entry has a block of timed steps in each round. Every other round has the reverse order, and
their number is even, so that a machine that steadily becomes slower or faster favors no entry.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from commhooks.cluster import LaunchedRanks, RankCaller, Ranks
from commhooks.cluster import links as shaped
from commhooks.costs.backends import NCCL, Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.units import format_duration, format_rate
from commhooks.errors import CommHookError, reason_of
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.hosts import measure_pairs, pairs_of_hosts
from commhooks.lab.comparison.rank_side import (
    FIRST_STEP,
    Block,
    ComparedModel,
    FirstSteps,
    StepTimes,
)
from commhooks.lab.comparison.result import (
    HOSTS,
    LOOPBACK,
    ComparisonError,
    Failure,
    Figures,
    HostPair,
    TrainingPoint,
)
from commhooks.lab.machine import ModelSize, cores
from commhooks.lab.models import Workload
from commhooks.lab.simulation import BASELINE, Job, Study, measure
from commhooks.lab.simulation.study import UNLIMITED

_ROUNDINGS = 100  # an error of up to this many units of precision counts as rounding
_LEAST, _MOST = 12, 50
"""Timed steps in a block: warm-ups take little of the time, and an interrupt finds some."""
_VALIDATIONS = 10
_MOST_SECONDS = 2e6  # the system waits for at most 2**31 milliseconds
_LINK = Link(1e9, latency_seconds=20e-6)  # of any rate; the latency is the default of simulate

ProgressCallback = Callable[[str, float, float], None]
"""Called with a description of the current work, the steps that are done, and all steps."""


@dataclass(frozen=True)
class Conditions:
    """Settings of a comparison: arguments of :func:`commhooks.lab.comparison.compare`.

    Raises ComparisonError if a number makes no sense.
    """

    workload: Workload
    world_size: int = 2
    steps: int = 50
    links: tuple[float, ...] = ()
    train: str | None = None
    train_steps: int = 200
    timeout: float = 600.0
    """Seconds for the steps of one entry that are run together."""
    progress: ProgressCallback = lambda *_: None

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= _MOST_SECONDS:
            raise ComparisonError(
                f"expected a time-out of at most {_MOST_SECONDS:.0f} s, found {self.timeout}"
            )
        for what, number in (("steps", self.steps), ("training steps", self.train_steps)):
            if number < 1:
                raise ComparisonError(f"{what}: expected at least 1, found {number}")
        if self.world_size < 2:
            raise ComparisonError(
                f"expected at least 2 ranks, found {self.world_size}: one has no peer"
            )
        for rate in self.links:
            if not 0 < rate < math.inf:
                raise ComparisonError(f"expected a rate in bits per second, found {rate}")
        for name, count in Counter(map(format_rate, self.links)).items():
            if count > 1:
                raise ComparisonError(f"expected different links, found {name} {count} times")

    def ranks(self, link: shaped.ShapedLink | None = None) -> Ranks:
        """Start ranks on this machine, over loopback or a link."""
        threads = max(1, cores() // self.world_size)
        device = self.workload.device
        return Ranks(self.world_size, link, device=device, threads=threads, timeout=self.timeout)


@dataclass(frozen=True)
class Task:
    """Some consecutive steps of one entry."""

    kind: Literal["verifying", "measuring", "training"]
    entry: Entry
    steps: int
    done: int = 0
    """The steps of the same kind that the entry has made before."""


def timing_tasks(entries: Sequence[Entry], steps: int) -> list[Task]:
    """Return blocks in which the entries take turns, see Note [Blocks of steps]."""
    rounds = 2 * math.ceil(steps / (2 * _MOST)) if steps >= 2 * _LEAST else 1
    ends = [steps * index // rounds for index in range(rounds + 1)]
    return [
        Task("measuring", entry, ends[index + 1] - ends[index], ends[index])
        for index in range(rounds)
        for entry in (entries if index % 2 == 0 else entries[::-1])
    ]


@dataclass
class Setting:
    """Measurements in one setting so far, by the names of entries."""

    name: str
    bits_per_second: float | None = None
    first_steps: dict[str, FirstSteps] = field(default_factory=dict)
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    """With the times of the slowest rank in each step, and the costs of rank 0."""
    training: dict[str, list[TrainingPoint]] = field(default_factory=dict)

    def figures(self, name: str) -> Figures | None:
        """Return the figures of an entry; None if it or the bare model has not been measured."""
        blocks, bare = self.blocks.get(name), self.blocks.get(BARE.name)
        if not blocks or not bare:
            return None
        seconds, backward = zip(*(times for block in blocks for times in block.times), strict=True)
        steps = [len(block.times) for block in blocks]
        # A median would ignore what a hook sends in every eighth step.
        is_uniform = all(block.is_uniform for block in blocks)
        average = statistics.median if is_uniform else statistics.fmean
        return Figures(
            step_seconds=average(seconds),
            step_spread_seconds=_spread(seconds),
            backward_seconds=average(backward),
            exposed_seconds=average(
                average(times.step for times in block.times)
                - statistics.median(times.step for times in other.times)
                for block, other in zip(blocks, bare, strict=False)  # an interrupt may leave one
            ),
            wire_bytes=statistics.fmean([block.wire_bytes for block in blocks], steps),
        )


@dataclass
class Experiment:
    """The entries of a comparison, its conditions, and what has been measured so far.

    Exact entries must return the exact mean, within rounding of the precision of ``model``.
    """

    conditions: Conditions
    model: ModelSize
    entries: list[Entry]
    settings: list[Setting] = field(default_factory=list)
    """The settings in the order in which they were measured; the first one is verified."""
    study: Study | None = None
    """Predictions for links of any rate, one link for each rank."""
    unpredicted: dict[str, str] = field(default_factory=dict)
    """The reasons why hooks are not in the study, by name."""
    no_study: Exception | None = None
    """The reason why there is no study, if one was tried."""
    alone_seconds: float | None = None
    """As :attr:`commhooks.lab.comparison.Comparison.alone_seconds`."""
    notes: list[str] = field(default_factory=list)
    pairs: list[HostPair] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    _steps_done: int = 0
    _all_steps: int = 0

    def run(self, links: Sequence[float]) -> None:
        """Measure over loopback and over links of these rates."""
        conditions = self.conditions
        first = self._tasks(is_first=True, trains=not links)
        others = self._tasks(is_first=False, trains=True)
        self._all_steps = _steps(first) + len(links) * _steps(others)
        with conditions.ranks() as ranks:
            loopback = self.begin(LOOPBACK, ranks)
            self.do(first, loopback, ranks)
            self.measure_alone(ranks)
            self._tell(loopback, "running hooks dry")
            self._dry_run(ranks)
        for rate in links:
            try:
                with (
                    shaped.shaped_link(conditions.world_size, rate) as link,
                    conditions.ranks(link) as ranks,
                ):
                    self.do(others, self.begin(format_rate(rate), ranks, rate), ranks)
            except shaped.LinkError as error:
                self._steps_done += _steps(others)
                self.notes.append(f"{format_rate(rate)} is predicted, not measured: {error}")

    def run_on_hosts(self, ranks: LaunchedRanks) -> None:
        """Measure the network between the hosts of ``ranks``, and the entries over it."""
        tasks = self._tasks(is_first=True, trains=True)
        self._all_steps = _steps(tasks)
        pairs = pairs_of_hosts(ranks)
        for index, pair in enumerate(measure_pairs(ranks, pairs)):
            self.pairs.append(pair)
            what = f"{HOSTS}: pair {index + 1} of {len(pairs)} measured"
            self.conditions.progress(what, 0, self._all_steps)
        if not pairs:
            self.notes.append("all ranks are on one host, so there was no network to measure")
        self.do(tasks, self.begin(HOSTS, ranks), ranks)
        self.measure_alone(ranks)

    def begin(self, name: str, ranks: RankCaller, bits_per_second: float | None = None) -> Setting:
        """Prepare ranks for the tasks of a new setting."""
        setting = Setting(name, bits_per_second)
        self._tell(setting, "preparing")
        ranks.keep(ComparedModel, self.conditions.workload)
        self.settings.append(setting)
        return setting

    def measure_alone(self, ranks: RankCaller) -> None:
        """Measure a step of the bare model on rank 0 alone, if ranks on this machine share devices.

        ``ranks`` are those of the last setting.
        """
        count, device = ranks.local_world_size, ranks.device
        if device.sharing(count) > 1:
            steps = min(self.conditions.steps, _MOST)
            self.alone_seconds = ranks.call(ComparedModel.time_alone, steps)[0]
            assert self.alone_seconds is not None
            self.notes.append(
                f"{count} ranks share {device} and take turns, so all steps, of bare too, "
                "contain the waiting, and small collectives take milliseconds; the verdicts add "
                "the exposed time to a step of one rank alone, "
                f"{format_duration(self.alone_seconds)}"
            )

    def do(self, tasks: Sequence[Task], setting: Setting, ranks: RankCaller) -> None:
        """Do tasks in a setting. If a hook fails, the other entries go on without it.

        Raises ComparisonError if the bare model or torch DDP fails.
        """
        for task in tasks:
            name = task.entry.name
            if not any(failure.hook == name for failure in self.failures):
                self._tell(setting, f"{task.kind} {name}")
                try:
                    self._do(task, setting, ranks)
                except Exception as error:
                    self._fail(error, task, setting)
                    ranks.restart()
            self._steps_done += task.steps

    def figures(self, setting: Setting) -> dict[str, Figures]:
        """Return the figures of all entries that have been measured in a setting."""
        names = [entry.name for entry in self.entries]
        return {name: found for name in names if (found := setting.figures(name)) is not None}

    def _tasks(self, *, is_first: bool, trains: bool) -> list[Task]:
        """Return the tasks of a setting; each training is in about ten parts."""
        tasks = [Task("verifying", entry, 1) for entry in self.entries if is_first]
        tasks += timing_tasks(self.entries, self.conditions.steps)
        if trains and self.conditions.train is not None:
            steps = self.conditions.train_steps
            stride = max(1, steps // _VALIDATIONS)
            tasks += [
                Task("training", entry, min(stride, steps - start), start)
                for entry in self.entries
                if entry != BARE
                for start in range(0, steps, stride)
            ]
        return tasks

    def _tell(self, setting: Setting, what: str) -> None:
        text = f"{setting.name}: {what}"
        self.conditions.progress(text, self._steps_done, self._all_steps)

    def _do(self, task: Task, setting: Setting, ranks: RankCaller) -> None:
        """Raises CommHookError if what a task has measured shows that its entry does not work."""
        entry, name = task.entry, task.entry.name
        match task.kind:
            case "verifying":
                first = _worst(ranks.call(ComparedModel.verify, entry))
                error, rounding = first.error or 0.0, _ROUNDINGS * self.model.precision
                if not math.isfinite(error):
                    raise CommHookError(
                        "the gradients of a step are not finite, or their mean is zero or not "
                        "finite"
                    )
                if error > rounding and entry.is_exact:
                    raise CommHookError(
                        f"expected the exact mean to within rounding ({rounding:.1e}), found "
                        f"gradients with a relative error of {error:.1e}. Is the model's gradient "
                        "the same in each run with the same torch.manual_seed()?"
                    )
                setting.first_steps[name] = first
            case "measuring":
                by_rank: list[Block] = ranks.call(
                    ComparedModel.time_block, entry, task.done, task.steps
                )
                steps = zip(*(block.times for block in by_rank), strict=True)
                slowest = tuple(StepTimes(*map(max, zip(*step, strict=True))) for step in steps)
                own = by_rank[0]
                block = replace(own, times=slowest)
                setting.blocks.setdefault(name, []).append(block)
            case "training":
                if task.done == 0:
                    ranks.call(ComparedModel.begin_training, entry, self.conditions.train)
                points = setting.training.setdefault(name, [])
                seconds = points[-1].seconds if points else 0.0
                for left in range(task.steps, 0, -1):
                    steps_by_rank = ranks.call(ComparedModel.train, left == 1)
                    seconds += max(own for own, _ in steps_by_rank)
                point = replace(steps_by_rank[0][1], seconds=seconds)
                points.append(point)
                if entry != TORCH and not math.isfinite(point.validation_loss):
                    raise CommHookError(
                        f"training diverged: expected a finite validation loss, found "
                        f"{point.validation_loss} after {point.step} steps"
                    )

    def _fail(self, error: Exception, task: Task, setting: Setting) -> None:
        """Drop what has been measured with the entry of a failed task in this phase."""
        name = task.entry.name
        details = "\n".join(getattr(error, "__notes__", ()))
        if task.entry in (BARE, TORCH):
            shown = "" if isinstance(error, CommHookError) else f"\n{details}"
            raise ComparisonError(
                f"{name!r} failed: {type(error).__name__}: {error}{shown}"
            ) from error
        setting.training.pop(name, None)
        if task.kind != "training":
            setting.blocks.pop(name, None)
        self.failures.append(Failure(name, setting.name, reason_of(error), f"{error}\n{details}"))

    def _dry_run(self, ranks: Ranks) -> None:
        """Prepare predictions. If it fails, ``ranks`` cannot be used any more."""
        figures = self.figures(self.settings[0])
        configs = {e.name: e.config for e in self.entries if e.config and e.name in figures}
        configs = {TORCH.name: {"name": BASELINE}} | configs  # torch DDP sends the same
        size, workload = self.conditions.world_size, self.conditions.workload
        job = Job(**vars(workload), ranks_per_machine=size, first_step=FIRST_STEP)
        on_gloo = workload.device.backend == Gloo.name
        try:
            pair = None if on_gloo else next(measure_pairs(ranks, [(0, 1)]))
            found = measure(job, list(configs.values()), [size], ranks)
        except Exception as error:
            self.notes.append(f"nothing is predicted: {reason_of(error)}")
            self.no_study = error
            return
        reasons = {name: found.reason(config, size) for name, config in configs.items()}
        self.unpredicted = {name: reason for name, reason in reasons.items() if reason}
        others = figures.keys() - configs.keys() - {BARE.name}
        self.unpredicted |= dict.fromkeys(others, "it is no hook of commhooks")
        self.notes += (f"{name} is not predicted: {why}" for name, why in self.unpredicted.items())
        if pair is not None:
            rate = format_rate(pair.bits_per_second)
            self.notes.append(f"over loopback, rank 0 sends to rank 1 at {rate}")
        self.study = Study(
            {
                name: found.of(config)
                for name, config in configs.items()
                if name not in self.unpredicted
            },
            Network(size, _LINK, _LINK),
            found.gloo if on_gloo else NCCL(),
            cores=cores() / size if on_gloo else math.inf,
            baseline=TORCH.name,
            loopback_seconds={name: each.step_seconds for name, each in figures.items()},
            # Bytes over Gloo's loopback only take time of cores, which is in its rates.
            loopback=Link(pair.bits_per_second, payload_share=1.0) if pair else UNLIMITED,
        )


def _steps(tasks: Sequence[Task]) -> int:
    return sum(task.steps for task in tasks)


def _worst(by_rank: Sequence[FirstSteps]) -> FirstSteps:
    errors = [first.error for first in by_rank if first.error is not None]
    peaks = [first.peak_bytes for first in by_rank if first.peak_bytes is not None]
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=None)
    return FirstSteps(worst, max(peaks, default=None), by_rank[0].wire_bytes)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
