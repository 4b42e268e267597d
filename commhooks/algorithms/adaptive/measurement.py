"""Measurements of a rank for ``auto``, and their report."""

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
from commhooks.algorithms.adaptive.planner import AgreedState, Planner, Report
from commhooks.algorithms.host_copy import HostCopy
from commhooks.algorithms.wrappers.table import HookTable
from commhooks.algorithms.wrappers.timing import Clock, HookTiming, Moment
from commhooks.algorithms.wrappers.trial import Check, Trial, draw_sample, relative_error
from commhooks.comm.communicator import Communicator
from commhooks.costs.step_trace import BucketTrace, Collective, StepTrace
from commhooks.hook.derived_bucket import bucket_with
from commhooks.planning import Choice
from reducer import GradBucket

_LOG = logging.getLogger("commhooks")
_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLE_SHARE = 1 << 14, 1 << 20, 1 / 64
_CHECKED, _CHECKED_IN_TRIALS = 1 << 11, 1 << 14
"""Elements of each group, and of each sample, that are averaged exactly as well."""


@dataclass
class _Part:
    """A group of a bucket, and the hooks that are measured on it in a step."""

    index: int
    names: Sequence[str]
    checked: str
    """The lossy hook in use, in a step that checks it; otherwise empty."""
    tried: Sequence[str]
    sample: GradBucket | None = None


@dataclass
class Measurement:
    """Measures what ranks have agreed on.

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
    agreed: AgreedState

    def __post_init__(self) -> None:
        self._agreement = Agreement(
            lambda reports, step: self._planner.decide(reports, self.agreed, step)
        )
        self._step = -1
        self._followed = -1
        """The step from which on ranks follow what they have :attr:`agreed` on."""
        self._spent_ns = self._first_ns = self._since_ns = 0
        self._spending_depth = 0
        self.load(self.agreed)

    def load(self, agreed: AgreedState) -> None:
        """Take over a plan and its history, and measure from the beginning."""
        self.agreed = replace(agreed, start=None)
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
        self._begin_trials()  # which have errors as large as their samples
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
        return {**self.agreed.metrics, **share}

    def is_idle(self, step: int) -> bool:
        """Return whether nothing is to be measured, agreed on or moved to other hooks in this step.

        The same on all ranks: that the step after the one with the last new plan has succeeded
        shows that residuals have moved everywhere, and that all ranks know it.
        """
        start = self.agreed.start
        is_early = start is not None and self._followed + 1 < step < start
        return is_early and not self._agreement.is_open

    def begin_step(self, step: int) -> bool:
        """Use what the last steps have brought, and return whether there is a new plan.

        Nothing here waits for another rank. See Note [One plan] in agreement.py.
        """
        self._first_ns = self._first_ns or time.monotonic_ns()
        before = self.agreed
        with self._spending():
            if (agreed := self._agreement.begin_step(step)) is not None:
                self.agreed, self._followed = agreed, step
                self._clear()
                for decision in agreed.history[len(before.history) :]:
                    _LOG.info("auto, step %d: %s", decision.step, decision)
            if step != self._step:  # a step that has failed begins again
                former, self._former = self._former, self._buckets
                # Measure from the beginning if the same new buckets came twice.
                if self._buckets == former and former not in ([], self._planned):
                    self._clear()
                    self._planned, self._planner = former, self.planner_of(former)
                    self.agreed = self._planner.begin(self.agreed, step)
            self._step, self._buckets = step, []
            start = self.agreed.start
            if start is not None and step >= self.agreed.report and not self._agreement.is_open:
                self._agreement.begin(self.report())
        return self.agreed.plan != before.plan

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Return the average of a bucket. Measure before and after it what is due."""
        agreed, step, report = self.agreed, bucket.step, self._report
        self._buckets.append((bucket.names, bucket.buffer().nbytes))
        if agreed.start is None or self.is_idle(step):
            return await self.table.reduce(bucket, comm)
        with self._spending():
            if bucket.index() == 0:
                self._launches[step] = []
                await self._agreement.send(comm, bucket.buffer().device)
            self._launches.setdefault(step, []).append(comm.launched)
            parts = self._parts(bucket)
            checked = {(part.index, part.checked): part.names for part in parts if part.checked}
            check = Check(bucket, checked, partial(self.table.residual, comm.size), _CHECKED)
        average = await self.table.reduce(bucket, comm)
        with self._spending():
            for key, squares in (await check.squares(average, comm)).items():
                self._put(report.errors, key, squares, lambda pair: relative_error(*pair))
            for part in parts:
                for hook in part.tried:
                    await self._try(part, hook, comm, is_last=step == agreed.report - 1)
            if agreed.is_check(step):
                gradients = dict(
                    zip(bucket.names, bucket_with(bucket, average).gradients(), strict=True)
                )
                for part in parts:
                    norms = torch._foreach_norm([gradients[name] for name in part.names])  # noqa: SLF001
                    squares = torch.stack(norms).double().square().sum()
                    self._put(report.norms, part.index, squares, math.sqrt)
                # Backward has ended. It may share cores with messages, and make them seem slower.
                if bucket.is_last() and agreed.probe:
                    device, backend = bucket.buffer().device, self._planner.backend
                    costs = await probe(agreed.probe, device, comm, self.clock, backend)
                    self._reads.append(lambda: setattr(report, "probe", costs()))
        self._ends[step] = self.clock.now()
        return average

    def _parts(self, bucket: GradBucket) -> list[_Part]:
        """Return the groups of a bucket, with samples of those on which hooks are tried."""
        groups, names, found = self._planner.groups, set(bucket.names), list[_Part]()
        agreed, step = self.agreed, bucket.step
        trials = agreed.trials if agreed.is_trial(step) else {}
        lossy = dict(self._planner.lossy(agreed)) if agreed.is_check(step) else {}
        share = sum(each.elements for each in groups) * _SAMPLE_SHARE
        size = int(min(max(share, _LEAST_SAMPLE), _MOST_SAMPLE))
        for i, group in enumerate(groups):
            if not names.issuperset(group.names):
                continue
            part = _Part(i, group.names, lossy.get(i, ""), trials.get(i, ()))
            if part.tried:
                order = list(trials)
                index, is_last = order.index(i), i == order[-1]
                part.sample = draw_sample(bucket, part.names, size, index=index, is_last=is_last)
            found.append(part)
        return found

    def recover(self) -> None:
        """Forget what may differ between ranks, because the step has failed on some rank."""
        self._launches.clear()
        self._ends.clear()
        self._begin_trials()

    def _begin_trials(self) -> None:
        for trial in self.trials.values():
            trial.begin()

    async def _try(self, part: _Part, hook: str, comm: Communicator, *, is_last: bool) -> None:
        """Let a hook average a sample, with what it has not sent in the steps before."""
        assert part.sample is not None
        trial, timing = self.trials[hook], HookTiming(self.clock)
        sample, size = part.sample, comm.size
        names = {(part.index, hook): sample.names} if is_last else {}
        check = Check(sample, names, partial(trial.residual, size), _CHECKED_IN_TRIALS)
        average = await timing.observe(trial.average(sample, comm))

        def outcome(pair: Sequence[float]) -> Choice:
            collectives = tuple(
                Collective(name, tensor_bytes(name, sent, size), ALL)
                for name, sent in timing.collectives
            )
            elements = sample.buffer().numel()
            return Choice(timing.local_seconds, collectives, relative_error(*pair), elements)

        for key, squares in (await check.squares(average, comm)).items():
            self._put(self._report.outcomes, key, squares, outcome)

    def _put(
        self, into: dict[Any, Any], key: object, found: Tensor, value: Callable[[Any], object]
    ) -> None:
        """Put a value into the report in a later step, given what was ``found``."""
        copy = HostCopy(found)
        self._reads.append(lambda: into.update({key: value(copy.read())}))

    def report(self) -> Report:
        """Return the measurements of earlier steps. Times are medians over the steps."""
        for read in self._reads:
            read()
        launches, ends, seconds = self._launches, self._ends, self.clock.seconds
        first, end = self.agreed.start or 0, self.agreed.report - 1
        steps = () if self.agreed.trials else range(first, end)
        # A step may lack buckets: dropped ones, or those of parameters that it does not use.
        has_all = {s for s, of_step in launches.items() if len(of_step) == len(self._planned)}
        timed = [s for s in steps if s in ends and s in has_all and launches.get(s + 1)]
        if not timed:  # the planner asks again, unless it knows times of earlier steps
            return self._report
        gaps = [list(starmap(seconds, pairwise(launches[s]))) for s in timed]
        between = [0.0, *map(median, zip(*gaps, strict=True))]
        buckets = zip(self._planned, between, strict=True)
        traces = tuple(BucketTrace(nbytes, gap, 0.0) for (_, nbytes), gap in buckets)
        after = (max(seconds(ends[s], launches[s + 1][0]), 0.0) for s in timed)
        self._report.step = StepTrace(traces, median(after), is_native=False)
        whole = (seconds(launches[s][0], launches[s + 1][0]) for s in timed)
        self._report.step_seconds, self._report.cores = median(whole), self.clock.cores()
        return self._report

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
