"""Measurements of a rank for ``auto``: those on the agenda of a step, and their report."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, starmap
from statistics import median
from typing import Any

import torch
from torch import Tensor

from commhooks.algorithms.adaptive.agreement import Agreement
from commhooks.algorithms.adaptive.choices import Buckets
from commhooks.algorithms.adaptive.link import ALL, probe, tensor_bytes
from commhooks.algorithms.adaptive.planner import Agenda, Course, Planner, Report
from commhooks.algorithms.host_copy import HostCopy
from commhooks.algorithms.wrappers.table import HookTable
from commhooks.algorithms.wrappers.timing import Clock, Moment, Run
from commhooks.algorithms.wrappers.trial import Check, Trial, draw_sample, relative_error
from commhooks.comm.communicator import Communicator
from commhooks.costs.step_trace import BucketTrace, Collective, StepTrace
from commhooks.planning import Choice, Group
from reducer import GradBucket

_LOG = logging.getLogger("commhooks")
_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLE_SHARE = 1 << 14, 1 << 20, 1 / 64
_CHECKED, _CHECKED_IN_TRIALS = 1 << 11, 1 << 14
"""Elements of each group, and of each sample, that are averaged exactly as well."""


@dataclass
class Measurement:
    """Measures what is on the agenda of the ``course`` that ranks have agreed on.

    Numbers of a device are read in a later step, so that the host waits only if it is a step ahead
    of the device.
    """

    planner_of: Callable[[Buckets], Planner]
    """Returns what decides for the buckets of a step."""
    trials: Mapping[str, Trial]
    """A trial of each hook that is tried, by its spec."""
    table: HookTable
    """Averages with the hook of each parameter."""
    clock: Clock
    """The clock of the device of the gradients."""
    course: Course

    def __post_init__(self) -> None:
        self._agreement = Agreement(
            lambda reports, step: self._planner.decide(reports, self.course, step)
        )
        self._step = -1
        self._followed = -1
        """The step from which on ranks follow the present course."""
        self._spent_ns = self._first_ns = self._since_ns = 0
        self._spending_depth = 0
        self.load(self.course)

    def load(self, course: Course) -> None:
        """Take over a plan and its history, and measure from the beginning."""
        self.course = replace(course, agenda=None)
        self._buckets: Buckets = []
        """The buckets of the present step so far."""
        self._former: Buckets = []
        """The buckets of the step before."""
        self._planned: Buckets = []
        """The buckets that the planner is for."""
        self._planner = self.planner_of([])
        self._clear()

    def _clear(self) -> None:
        """Begin another report."""
        self._agreement.cancel()
        self._report = Report()
        self._reads: list[Callable[[], None]] = []
        """Functions that put measurements into the report, and wait for a device."""
        self._launches: dict[int, list[Moment]] = {}
        """The launches of the buckets of each step."""
        self._ends: dict[int, Moment] = {}
        """The moment when the last bucket of each step was averaged."""

    def metrics(self) -> dict[str, float]:
        """Return numbers about the plan and the link, and the share of time spent here."""
        elapsed_ns = time.monotonic_ns() - self._first_ns
        share = {"planning_share": self._spent_ns / elapsed_ns} if self._first_ns else {}
        return {**self.course.metrics, **share}

    def is_idle(self, step: int) -> bool:
        """Return whether nothing is to be measured, agreed on or moved to other hooks in this step.

        The same on all ranks: a later step than that with the last new plan shows that it has
        succeeded everywhere, so residuals have moved.
        """
        agenda = self.course.agenda
        is_early = agenda is not None and self._followed < step < agenda.start
        return is_early and not self._agreement.is_open

    def begin_step(self, step: int) -> bool:
        """Use what the last steps have brought, and return whether there is a new plan.

        Nothing here waits for another rank. See Note [One plan] in agreement.py.
        """
        self._first_ns = self._first_ns or time.monotonic_ns()
        before = self.course
        with self._spending():
            if (course := self._agreement.begin_step(step)) is not None:
                self.course, self._followed = course, step
                self._clear()
                for decision in course.history[len(before.history) :]:
                    _LOG.info("auto, step %d: %s", decision.step, decision)
            if step != self._step:  # a step that has failed begins again
                self._look_at_buckets(step)
            self._step, self._buckets = step, []
            agenda = self.course.agenda
            if agenda is not None and step == agenda.start:
                self._begin_trials()
            if agenda is not None and step >= agenda.report and not self._agreement.is_open:
                self._agreement.begin(self.report(agenda))
        return self.course.plan != before.plan

    def _look_at_buckets(self, step: int) -> None:
        """Measure from the beginning if the same new buckets came twice."""
        former, self._former = self._former, self._buckets
        if self._buckets == former and self._buckets not in ([], self._planned):
            self._clear()
            self._planned, self._planner = former, self.planner_of(former)
            self.course = self._planner.begin(self.course, step)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Return the average of a bucket. Measure before and after it what is due."""
        agenda, step, report = self.course.agenda, bucket.step, self._report
        self._buckets.append((bucket.names, bucket.buffer().nbytes))
        if agenda is None or self.is_idle(step):
            return await self.table.reduce(bucket, comm)
        names, every = set(bucket.names), enumerate(self._planner.groups)
        groups = {i: group for i, group in every if names.issuperset(group.names)}
        is_check = agenda.is_check(step)
        lossy = self._planner.lossy(self.course) if is_check else {}
        lossy = {key: names for key, names in lossy.items() if key[0] in groups}
        tried = {i: groups[i] for i in agenda.trials if i in groups and agenda.is_trial(step)}
        with self._spending():
            if bucket.index() == 0:
                self._launches[step] = []
                await self._agreement.send(comm, bucket.buffer().device)
            self._launches.setdefault(step, []).append(comm.launched)
            samples = {i: self._draw_sample(agenda, bucket, i) for i in tried}
            check = Check.of(bucket, lossy, partial(self.table.residual, comm.size), _CHECKED)
        average = await self.table.reduce(bucket, comm)
        with self._spending():
            for key, squares in (await check.squares(average, comm)).items():
                self._put(report.errors, key, squares, lambda pair: relative_error(*pair))
            for i, sample in samples.items():
                for hook in agenda.trials[i]:
                    await self._try(i, hook, sample, comm, is_last=step == agenda.report - 1)
            if is_check:
                self._measure_norms(bucket, groups, average)
                # Backward has ended. It may share cores with messages, and make them seem slower.
                if bucket.is_last() and agenda.probe:
                    device, backend = bucket.buffer().device, self._planner.backend
                    costs = await probe(agenda.probe, device, comm, self.clock, backend)
                    self._reads.append(lambda: setattr(report, "probe", costs()))
        self._ends[step] = self.clock.now()
        return average

    def recover(self) -> None:
        """Forget what may differ between ranks, because the step has failed on some rank."""
        self._launches.clear()
        self._ends.clear()
        self._begin_trials()

    def _begin_trials(self) -> None:
        for trial in self.trials.values():
            trial.begin()

    def _draw_sample(self, agenda: Agenda, bucket: GradBucket, group: int) -> GradBucket:
        """Return a sample of a group that hooks are tried on."""
        groups, trials = self._planner.groups, list(agenda.trials)
        share = sum(each.elements for each in groups) * _SAMPLE_SHARE
        size = int(min(max(share, _LEAST_SAMPLE), _MOST_SAMPLE))
        index, is_last = trials.index(group), group == trials[-1]
        return draw_sample(bucket, groups[group].names, size, index=index, is_last=is_last)

    async def _try(
        self, group: int, hook: str, sample: GradBucket, comm: Communicator, *, is_last: bool
    ) -> None:
        """Let a hook average a sample, with what it has not sent in the steps before."""
        trial, run = self.trials[hook], Run(self.clock)
        names = {(group, hook): sample.names} if is_last else {}
        check = Check.of(sample, names, partial(trial.residual, comm.size), _CHECKED_IN_TRIALS)
        average = await run.observe(trial.average(sample, comm))
        size, elements = comm.size, sample.buffer().numel()

        def outcome(pair: Sequence[float]) -> Choice:
            collectives = tuple(
                Collective(name, tensor_bytes(name, sent, size), ALL)
                for name, sent in run.collectives
            )
            return Choice(run.local_seconds, collectives, relative_error(*pair), elements)

        for key, squares in (await check.squares(average, comm)).items():
            self._put(self._report.outcomes, key, squares, outcome)

    def _measure_norms(
        self, bucket: GradBucket, groups: Mapping[int, Group], average: Tensor
    ) -> None:
        flat = average.view(-1)
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        views = {name: flat[i : i + length] for name, i, length in places}
        for i, group in groups.items():
            norms = torch._foreach_norm([views[name] for name in group.names])  # noqa: SLF001
            self._put(self._report.norms, i, torch.stack(norms).double().square().sum(), math.sqrt)

    def _put(
        self, into: dict[Any, Any], key: object, found: Tensor, value: Callable[[Any], object]
    ) -> None:
        """Put a value into the report in a later step, given what was ``found``."""
        copy = HostCopy(found)
        self._reads.append(lambda: into.update({key: value(copy.read())}))

    def report(self, agenda: Agenda) -> Report:
        """Return the measurements of earlier steps."""
        for read in self._reads:
            read()
        if not agenda.trials:
            self._report_times(agenda)
        return self._report

    def _report_times(self, agenda: Agenda) -> None:
        """Put medians over the steps that were timed into the report, if there are any."""
        launches, ends, seconds = self._launches, self._ends, self.clock.seconds
        steps = range(agenda.start, agenda.report - 1)
        timed = [s for s in steps if s in ends and launches.get(s) and launches.get(s + 1)]
        if not timed:
            return
        gaps = [list(starmap(seconds, pairwise(launches[s]))) for s in timed]
        between = [0.0, *map(median, zip(*gaps, strict=True))]
        buckets = zip(self._planned, between, strict=True)
        traces = tuple(BucketTrace(nbytes, gap, 0.0) for (_, nbytes), gap in buckets)
        after = (max(seconds(ends[s], launches[s + 1][0]), 0.0) for s in timed)
        self._report.step = StepTrace(traces, median(after), is_native=False)
        whole = (seconds(launches[s][0], launches[s + 1][0]) for s in timed)
        self._report.step_seconds, self._report.cores = median(whole), self.clock.cores()

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Count the time of the context as that of measuring, once if contexts overlap.

        They do, where the coroutine of a bucket waits for a collective.
        """
        if not self._spending_depth:
            self._since_ns = time.monotonic_ns()
        self._spending_depth += 1
        try:
            yield
        finally:
            self._spending_depth -= 1
            if not self._spending_depth:
                spent = time.monotonic_ns() - self._since_ns
                self._spent_ns += spent
                self._report.spent_seconds += spent * 1e-9
