"""Hooks in pytest-benchmark: what the fixture ``hook_benchmark`` does.

Note [Benchmarks in turn]
~~~~~~~~~~~~~~~~~~~~~~~~~
Times of hooks can be compared only if the hooks take turns: a machine that becomes slower would
otherwise favor the first ones. But pytest runs one test after the other. So a test only verifies
its hook, and leaves an empty entry in pytest-benchmark's table. After the last test of a module,
all its hooks are timed in turn as in ``commhooks compare``, and the entries are filled. Nothing is
timed in this process: the times of an entry are those of the slowest rank in each step.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from commhooks.cluster import CPU, Device, Ranks
from commhooks.cluster.links import LinkError, shaped_link
from commhooks.costs.units import format_rate, parse_rate
from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.options import check_option_names
from commhooks.hook.registry import create
from commhooks.hook.spec import HookLike, HookSpec
from commhooks.lab.comparison.compare import result_of
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.experiment import Conditions, Experiment, Task, timing_tasks
from commhooks.lab.comparison.rank_side import FirstSteps
from commhooks.lab.comparison.result import LOOPBACK
from commhooks.lab.machine import ModelSize, check_model
from commhooks.lab.models import Workload
from commhooks.lab.simulation.dry_run import check_kernels

_BASELINES = {entry.name: entry for entry in (BARE, TORCH, Entry.of("noop"))}


@dataclass(frozen=True)
class _BenchmarkSettings(Conditions):
    """Hooks are comparable if these are equal."""

    ranks_per_host: int = 1

    @property
    def link(self) -> str:
        return format_rate(self.links[0]) if self.links else LOOPBACK

    def __str__(self) -> str:
        assert isinstance(self.workload, _Workload)
        module = self.workload.module[0]
        made_by = filter(None, (self.workload.model, self.workload.input))
        made = ", ".join(str(name).removeprefix(f"{module}:") for name in made_by)
        hosts = f", {self.ranks_per_host} on each host" if self.ranks_per_host > 1 else ""
        wrapper = "".join(f", {name}={value}" for name, value in self.workload.wrapper)
        wrapper += "" if self.workload.device == CPU else f", on {self.workload.device}"
        wrapper += "" if self.workload.set_to_none else ", gradients set to zero"
        return (
            f"{module}: {made}, {self.world_size} ranks{hosts}, {self.link}, "
            f"{self.steps} steps{wrapper}"
        )


@dataclass(frozen=True)
class _Workload(Workload):
    """A workload of a test module, which ranks load first, with its models, hooks and functions."""

    module: tuple[str, str] = ("", "")
    """Name and path. With --import-mode=importlib it cannot be imported by its name."""

    def make_module(self) -> nn.Module:
        name, path = self.module
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return super().make_module()


class _Group:
    """The hooks of a module in one place."""

    def __init__(self, place: _BenchmarkSettings, size: ModelSize, ranks: Ranks) -> None:
        self._ranks = ranks
        self._experiment = Experiment(place, size, [])
        self._setting = self._experiment.begin(place.link, ranks, *place.links)
        self.benchmarks: list[tuple[str, Any]] = []
        """The hooks that are timed, and what waits for their steps."""
        for entry in _BASELINES.values():
            self.verify(entry)

    def verify(self, entry: Entry) -> FirstSteps:
        """Return the results of an entry's first steps. Raises CommHookError if it fails."""
        known = self._setting.first_steps.get(entry.name)
        if known is None:
            self._experiment.entries.append(entry)
            self._experiment.do([Task("verifying", entry, 1)], self._setting, self._ranks)
            self.raise_failures()
            known = self._setting.first_steps[entry.name]
        return known

    def time_in_turn(self) -> str:
        """Time all entries, fill the benchmarks, and return a table.

        A hook that fails now has no times, but a line in the table.
        """
        experiment = self._experiment
        tasks = timing_tasks(experiment.entries, experiment.conditions.steps)
        experiment.do(tasks, self._setting, self._ranks)
        experiment.measure_alone(self._ranks)
        found = result_of(experiment)
        rows = {row.hook: row for row in found.rows}
        for name, benchmark in self.benchmarks:
            row = rows.get(name)
            if row is None:
                continue
            benchmark.has_error = False
            for block in self._setting.blocks[name]:
                for times in block.times:
                    benchmark.stats.update(times.step)
            figures = {n: self._setting.figures(n) for n in (*_BASELINES, name)}
            benchmark.extra_info.update(
                step_seconds={n: f.step_seconds for n, f in figures.items() if f},
                backward_seconds={n: f.backward_seconds for n, f in figures.items() if f},
                ratio_to_torch=row.to_torch,
                exposed_seconds=row.exposed_seconds,
                floor_seconds=row.floor_seconds,
                gradient_bytes=row.gradient_bytes,
                wire_bytes=row.wire_bytes,
                ratio=row.ratio,
                peak_bytes=row.peak_bytes,
            )
        return str(found)

    def raise_failures(self) -> None:
        """Raise what has failed since the last call; these hooks are left out from then on."""
        failures = self._experiment.failures
        if failures:
            failed = {failure.hook for failure in failures}
            entries = self._experiment.entries
            self._experiment.entries = [entry for entry in entries if entry.name not in failed]
            error = CommHookError("; ".join(map(str, failures)))
            error.add_note("\n".join(failure.details for failure in failures))
            failures.clear()
            raise error


@dataclass
class ModuleBenchmarks:
    """The benchmarks of one test module.

    ``tables`` are filled by :meth:`time_in_turn`, by their titles.
    """

    name: str
    path: Path
    tables: dict[str, str] = field(default_factory=dict)
    _groups: dict[_BenchmarkSettings, _Group] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def group(self, place: _BenchmarkSettings) -> _Group:
        """Return the hooks in a place; skip the test if this machine cannot make the link."""
        if place not in self._groups:
            with ExitStack() as stack:
                link = None
                for rate in place.links:
                    hosts = shaped_link(place.world_size, rate, ranks_per_host=place.ranks_per_host)
                    try:
                        link = stack.enter_context(hosts)
                    except LinkError as error:
                        pytest.skip(str(error))
                size = check_model(place.workload, place.world_size)
                group = _Group(place, size, stack.enter_context(place.ranks(link)))
                self._groups[place] = group
                self._open.push(stack.pop_all())
        return self._groups[place]

    def time_in_turn(self) -> None:
        """Time the hooks of each place in turn. Raises CommHookError if one fails."""
        for place, group in self._groups.items():
            if group.benchmarks:
                self.tables[str(place)] = group.time_in_turn()
        for group in self._groups.values():
            group.raise_failures()

    def close(self) -> None:
        """End the processes and remove the links."""
        self._open.close()


@dataclass(frozen=True)
class HookBenchmarks:
    """The fixture ``hook_benchmark``. ``options`` are those of the command line."""

    module: ModuleBenchmarks
    benchmark: Any
    options: dict[str, Any]

    def __call__(
        self,
        hook: HookLike | Entry,
        /,
        *,
        model: str | Callable[[], nn.Module],
        batch: str | Callable[[], Any] | None = None,
        world_size: int = 2,
        link: str = LOOPBACK,
        ranks_per_host: int = 1,
        steps: int = 50,
        device: Device | str | None = None,
        wrapper: Mapping[str, Any] | None = None,
        set_to_none: bool = True,
        **hook_options: Any,
    ) -> FirstSteps:
        """Verify a hook now, and time its steps after the last test of the module.

        ``hook`` is as for :func:`commhooks.register`, or "bare" or "torch". docs/benchmarking.md
        describes the other arguments, and what is timed: Note [Benchmarks in turn]. If an option
        has the name of an argument, pass a config or a hook.

        Returns:
            FirstSteps: the error of the first step's gradients against the exact mean, the peak of
            memory, and the bytes on the wire. With ``--benchmark-disable`` this is all.

        Raises:
            DeviceError, LimitError: before anything starts.
            CommHookError: the hook needs CuPy, and it cannot be used; the hook fails; its gradients
                are not finite; or it is lossless, and they are not the exact mean.
        """
        chosen = {"world_size": world_size, "link": link, "steps": steps, **self.options}
        device = Device.choose(chosen.pop("device", device))
        link = chosen.pop("link")
        links = () if link == LOOPBACK else (parse_rate(link),)
        shared = {"host_memory": True} if ranks_per_host > 1 else {}
        given = shared | dict(wrapper or {})
        options = tuple((name, _hashable(given[name])) for name in sorted(given))
        module = self.module.name, str(self.module.path)
        workload = _Workload(model, batch, options, set_to_none, device, module)
        place = _BenchmarkSettings(workload, links=links, ranks_per_host=ranks_per_host, **chosen)
        entry = _entry(hook, hook_options)
        if entry.config is not None:
            check_kernels([HookSpec(entry.name, entry.config)], device)
        group = self.module.group(place)
        self.benchmark.group = str(place)
        first: FirstSteps = self.benchmark.pedantic(group.verify, (entry,))
        noop_error = group.verify(_BASELINES["noop"]).error
        self.benchmark.extra_info.update(hook=entry.name, error=first.error, noop_error=noop_error)
        if self.benchmark.stats is not None:  # it is None with --benchmark-disable
            self.benchmark.stats.stats.data.clear()  # the time of the verification
            self.benchmark.has_error = True  # until it has times: pytest-benchmark leaves it out
            group.benchmarks.append((entry.name, self.benchmark))
        return first


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _entry(hook: HookLike | Entry, options: dict[str, Any]) -> Entry:
    refused = CommHookOptionError(f"expected no options beside {hook!r}, found {options}")
    if isinstance(hook, Entry) or hook in (BARE.name, TORCH.name):
        if options:
            raise refused
        return hook if isinstance(hook, Entry) else _BASELINES[str(hook)]
    match hook:
        case str() | Mapping() if options:
            hook = create(hook, **options)
        case type():
            check_option_names(hook.name, hook, options)
            hook = hook(**options)
        case _ if options:
            raise refused
    return Entry.of(hook)
