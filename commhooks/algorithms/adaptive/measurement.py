"""What a rank does for ``auto`` in a step: it measures what is on the agenda, and reports it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, starmap
from statistics import median
from typing import Any

import torch
from torch import Tensor

from commhooks.algorithms.adaptive.agreement import Agreement
from commhooks.algorithms.adaptive.control import Agenda, Controller
from commhooks.algorithms.adaptive.groups import Buckets
from commhooks.algorithms.adaptive.knowledge import Report
from commhooks.algorithms.adaptive.link import ALL, Probe, probe, tensor_bytes
from commhooks.algorithms.host_copy import HostCopy
from commhooks.algorithms.wrappers.table import HookTable
from commhooks.algorithms.wrappers.timing import Clock, Moment, Run, observe
from commhooks.algorithms.wrappers.trial import Check, Trial, draw_sample, relative_error
from commhooks.comm.communicator import Communicator
from commhooks.costs.step_trace import Collective
from commhooks.planning import Choice, Group
from reducer import GradBucket

_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLE_SHARE = 1 << 14, 1 << 20, 1 / 64
_CHECKED, _CHECKED_IN_TRIALS = 1 << 11, 1 << 14
"""Elements of each group, and of each sample, that are averaged exactly as well."""


class Measurement:
    """Does what is on the agenda of ``control``.

    On a device, numbers are read in a later step than that which made them, so that the host does
    not wait, unless it is a step ahead of the device.

    Args:
        control: Has what was decided, and decides on rank 0.
        trials: For each hook that is tried.
        table: Averages with the hook of each parameter.
        elements: Number of elements of the model.
        groups_of: Returns the groups of buckets, which are given as names of parameters.
        clock: Clock of the device of the gradients.
        rank: This rank of the group.
    """

    def __init__(
        self,
        control: Controller,
        trials: Mapping[int, Trial],
        table: HookTable,
        elements: int,
        groups_of: Callable[[Sequence[Sequence[str]]], Sequence[Group]],
        clock: Clock,
        rank: int,
    ) -> None:
        self.control = control
        self._trials = trials
        self._table = table
        self._sample_size = int(min(max(elements * _SAMPLE_SHARE, _LEAST_SAMPLE), _MOST_SAMPLE))
        self._groups_of = groups_of
        self._clock = clock
        self._rank = rank
        self._agreement = Agreement(control.decide)
        self._step = -1
        self._buckets: list[tuple[tuple[str, ...], int]] = []
        """Buckets of the present step."""
        self._former: Buckets = ()
        """Buckets of the step before it."""
        self._followed = -1
        """The step from which on ranks follow the last instructions."""
        self._spent_ns = self._first_ns = self._elapsed_ns = 0
        self._clear()

    def _clear(self) -> None:
        """Forget what is in the last report."""
        self._agreement.cancel()
        self._launches: dict[int, list[Moment]] = {}
        self._ends: dict[int, Moment] = {}
        self._outcomes: dict[tuple[int, int], tuple[int, Run, HostCopy]] = {}
        """Of trials, by group and hook: elements, times, and squared norms."""
        self._errors: dict[int, HostCopy] = {}
        self._norms: dict[int, HostCopy] = {}
        self._probe: Callable[[], Probe] | None = None
        self._reported_ns = self._spent_ns

    def load(self, data: Mapping[str, Any]) -> None:
        """Go on with the state of a controller, and measure from the beginning."""
        self.control.load(data)
        self._former, self._buckets = (), []
        self._clear()

    def metrics(self) -> dict[str, float]:
        """Return numbers about the plan and the link, and the share of the time of this."""
        share = {"planning_share": self._spent_ns / self._elapsed_ns} if self._elapsed_ns else {}
        return {"plans": float(len(self.control.history))} | self.control.metrics | share

    def is_idle(self, step: int) -> bool:
        """Return whether nothing is to be measured, agreed on or moved to other hooks in this step.

        The same on all ranks: a later step than that with the last new plan shows that it has
        succeeded everywhere, so residuals have moved.
        """
        agenda = self.control.agenda
        is_early = agenda is not None and self._followed < step < agenda.start
        return is_early and not self._agreement.is_open

    def begin_step(self, step: int) -> bool:
        """Use what the last steps have brought, and return whether there is a new plan.

        Nothing here waits for another rank. See Note [One plan] in agreement.py.
        """
        self._first_ns = self._first_ns or time.monotonic_ns()
        self._elapsed_ns = time.monotonic_ns() - self._first_ns
        has_new_plan = False
        with self._spending():
            instructions = self._agreement.begin_step(step)
            if instructions is not None:
                has_new_plan = self.control.follow(instructions)
                self._followed = step
                self._clear()
            if step != self._step:  # a step that has failed begins again
                self._look_at_buckets(step)
            self._step, self._buckets = step, []
            agenda = self.control.agenda
            if agenda is not None and step == agenda.start:
                self._begin_trials()
            if agenda is not None and step >= agenda.report and not self._agreement.is_open:
                self._agreement.begin(self._report(agenda), rank=self._rank)
        return has_new_plan

    def _look_at_buckets(self, step: int) -> None:
        """Measure from the beginning if the same new buckets came twice."""
        finished, former = tuple(self._buckets), self._former
        self._former = finished
        names = [names for names, _ in finished]
        if finished == former and names and names != [each for each, _ in self.control.buckets]:
            groups = self._groups_of(names)
            self.control.use_buckets(finished, groups, step)
            self._clear()

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Return the average of a bucket. Measure before and after it what is due."""
        agenda, step = self.control.agenda, bucket.step
        self._buckets.append((tuple(bucket.names), bucket.buffer().nbytes))
        if agenda is None or self.is_idle(step):
            return await self._table.reduce(bucket, comm)
        with self._spending():
            if bucket.index() == 0:
                self._launches[step] = []
                await self._agreement.send(comm, bucket.buffer().device)
            self._launches.setdefault(step, []).append(comm.launched)
            samples = self._draw_samples(agenda, bucket) if agenda.is_trial(step) else {}
            check = self._check(bucket, comm) if agenda.is_check(step) else None
        average = await self._table.reduce(bucket, comm)
        with self._spending():
            if check is not None:
                squares = await check.squares(average, comm)
                self._errors |= {i: HostCopy(pair) for i, pair in squares.items()}
            for group, sample in samples.items():
                await self._try(group, sample, comm, is_last=step == agenda.report - 1)
            if agenda.is_check(step):
                self._measure_norms(bucket, average)
                # Backward has ended. It may share cores with messages, and make them seem slower.
                if bucket.is_last() and agenda.probe:
                    device, backend = bucket.buffer().device, self.control.candidates.backend
                    self._probe = await probe(agenda.probe, device, comm, self._clock, backend)
        self._ends[step] = self._clock.now()
        return average

    def recover(self) -> None:
        """Forget what may differ between ranks, because the step has failed on some rank."""
        self._launches.clear()
        self._ends.clear()
        self._begin_trials()

    def _begin_trials(self) -> None:
        for trial in self._trials.values():
            trial.begin()

    # --------------------------------------------------------------------------------- agreement

    def _report(self, agenda: Agenda) -> Report:
        """Return what was measured on the agenda. All of it is of earlier steps."""
        report = Report(self._clock.cores(), (self._spent_ns - self._reported_ns) * 1e-9)
        report.probe = self._probe and self._probe()
        seconds, launches = self._clock.seconds, self._launches
        steps = () if agenda.trials else range(agenda.start, agenda.report - 1)
        timed = [s for s in steps if s in self._ends and launches.get(s) and launches.get(s + 1)]
        if timed:
            report.step_seconds = median(seconds(launches[s][0], launches[s + 1][0]) for s in timed)
            report.forward_seconds = median(
                max(seconds(self._ends[s], launches[s + 1][0]), 0.0) for s in timed
            )
            gaps = [list(starmap(seconds, pairwise(launches[s]))) for s in timed]
            report.launches = [0.0, *map(median, zip(*gaps, strict=True))]
        report.outcomes = {
            (group, hook): Choice(
                hook,
                run.local_seconds,
                tuple(
                    Collective(name, tensor_bytes(name, sent, self.control.candidates.size), ALL)
                    for name, sent in run.collectives
                ),
                relative_error(*squares.read()),
                elements,
            )
            for (group, hook), (elements, run, squares) in self._outcomes.items()
        }
        report.errors = {i: relative_error(*pair.read()) for i, pair in self._errors.items()}
        report.norms = {i: math.sqrt(square.read()) for i, square in self._norms.items()}
        return report

    # --------------------------------------------------------------------------------- measuring

    def _draw_samples(self, agenda: Agenda, bucket: GradBucket) -> dict[int, GradBucket]:
        """Return samples of the bucket's groups that hooks are tried on."""
        groups, last = self.control.groups_of(bucket.names), len(agenda.trials) - 1
        return {
            i: draw_sample(
                bucket, groups[i].names, self._sample_size, index=index, is_last=index == last
            )
            for index, i in enumerate(agenda.trials)
            if i in groups
        }

    async def _try(
        self, group: int, sample: GradBucket, comm: Communicator, *, is_last: bool
    ) -> None:
        """Let hooks average a sample, each with what it has not sent in the steps before."""
        for hook in self.control.hooks_to_try(group):
            trial, run = self._trials[hook], Run(self._clock)
            names, residual = {group: sample.names}, partial(trial.residual, comm.size)
            check = Check.of(sample, names, residual, _CHECKED_IN_TRIALS) if is_last else None
            average = await observe(trial.average(sample, comm), run)
            if check is not None:
                squares = HostCopy((await check.squares(average, comm))[group])
                self._outcomes[group, hook] = sample.buffer().numel(), run, squares

    def _check(self, bucket: GradBucket, comm: Communicator) -> Check | None:
        """Return what is compared of the hooks in use."""
        groups = self.control.groups_of(bucket.names)
        lossy = {i: group.names for i, group in groups.items() if self.control.is_lossy(i)}
        return Check.of(bucket, lossy, partial(self._table.residual, comm.size), _CHECKED)

    def _measure_norms(self, bucket: GradBucket, average: Tensor) -> None:
        flat = average.view(-1)
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        views = {name: flat[i : i + length] for name, i, length in places}
        for i, group in self.control.groups_of(bucket.names).items():
            norms = torch._foreach_norm([views[name] for name in group.names])  # noqa: SLF001
            self._norms[i] = HostCopy(torch.stack(norms).double().square().sum())

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Count the time of the context as that of measuring."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._spent_ns += time.monotonic_ns() - start
