"""What a rank does for ``auto`` in a step: it measures what is on the agenda, and reports it."""

import math
import pickle
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import pairwise, starmap
from statistics import median
from typing import Any

import torch
from torch import Tensor

from commhooks.algorithms.adaptive.check import Check
from commhooks.algorithms.adaptive.control import Controller
from commhooks.algorithms.adaptive.groups import Buckets
from commhooks.algorithms.adaptive.link import ALL, Probe, probe, tensor_bytes
from commhooks.algorithms.adaptive.messages import Agenda, Instructions, Report
from commhooks.algorithms.wrappers.table import HookTable
from commhooks.algorithms.wrappers.timing import Clock, Moment, Run, observe
from commhooks.algorithms.wrappers.trial import Trial, draw_sample, relative_error
from commhooks.comm.communicator import Communicator
from commhooks.costs.step_trace import Collective
from commhooks.planning import Group, Outcome
from reducer import GradBucket

__all__ = ["Measurement"]

_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLE_SHARE = 1 << 14, 1 << 20, 1 / 64
_CHECKED, _CHECKED_IN_TRIALS = 1 << 11, 1 << 14
"""Elements of each group, and of each sample, that are averaged exactly as well."""

_Run = Callable[[GradBucket, Communicator], Coroutine[Any, Any, Tensor]]


class Measurement:
    """Does what is on the agenda of ``control``.

    Args:
        control: Knows what was reported, and decides on rank 0.
        trials: For each hook that is tried.
        table: The hook of each parameter.
        elements: Number of elements of the model.
        groups_of: Returns the groups of buckets, which are given as names of parameters.
        clock: Clock of the device of the gradients.
    """

    def __init__(
        self,
        control: Controller,
        trials: Mapping[int, Trial],
        table: HookTable,
        elements: int,
        groups_of: Callable[[Sequence[Sequence[str]]], Sequence[Group]],
        clock: Clock,
    ) -> None:
        self.control = control
        self._trials = trials
        self._table = table
        self._sample_size = int(min(max(elements * _SAMPLE_SHARE, _LEAST_SAMPLE), _MOST_SAMPLE))
        self._groups_of = groups_of
        self._clock = clock
        self._step = -1
        self._buckets: list[tuple[tuple[str, ...], int]] = []
        """Of the present step."""
        self._former: Buckets = ()
        """Of the step before it."""
        self._reports: tuple[int, list[Report]] | None = None
        """What ranks have reported, and in which step."""
        self._to_send: bytes | None = None
        """The instructions that ranks are to have in this step, if any; empty but on rank 0."""
        self._received: tuple[int, Instructions] | None = None
        """The instructions of rank 0, and in which step they came."""
        self._followed = -1
        """The step from which on ranks follow the last instructions."""
        self._spent_ns = self._first_ns = self._elapsed_ns = 0
        self._clear()

    def _clear(self) -> None:
        """Forget what is in the last report."""
        self._launches: dict[int, list[Moment]] = {}
        self._ends: dict[int, Moment] = {}
        self._outcomes: dict[tuple[int, int], tuple[int, Run, Tensor]] = {}
        """Of trials, by group and hook: elements, times, and squared norms."""
        self._errors: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self._probe: Callable[[], Probe] | None = None
        self._reported_ns = self._spent_ns

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
        return (
            agenda is not None
            and self._followed < step < agenda.start
            and self._reports is None
            and self._to_send is None
        )

    def begin_step(self, step: int) -> bool:
        """Use what the last steps have brought, and return whether there is a new plan.

        Nothing here waits for another rank. See Note [One plan].
        """
        start = time.monotonic_ns()
        self._first_ns = self._first_ns or start
        self._elapsed_ns = start - self._first_ns
        control, has_new_plan = self.control, False
        if self._received is not None and self._received[0] != step:
            has_new_plan = control.follow(self._received[1])
            self._followed = step
            self._to_send = None
            self._clear()
        self._received = None
        if self._reports is not None and self._reports[0] != step:
            control.take(self._reports[1])
            self._to_send = b""
        self._reports = None
        if step != self._step:  # a step that has failed begins again
            self._look_at_buckets(step)
        self._step, self._buckets = step, []
        if control.agenda is not None and step == control.agenda.start:
            self._begin_trials()
        self._spent_ns += time.monotonic_ns() - start
        return has_new_plan

    def _look_at_buckets(self, step: int) -> None:
        """Measure from the beginning if the same new buckets came twice."""
        finished, former = tuple(self._buckets), self._former
        self._former = finished
        if finished and finished == former and not self.control.has_buckets(finished):
            groups = self._groups_of([names for names, _ in finished])
            self.control.use_buckets(finished, groups, step)
            self._to_send = None
            self._clear()

    async def around(self, run: _Run, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Await the average of a bucket, with what is to be measured before and after it."""
        agenda, step = self.control.agenda, bucket.step
        self._buckets.append((tuple(bucket.names), bucket.buffer().nbytes))
        if agenda is None or self.is_idle(step):
            return await run(bucket, comm)
        if bucket.index() == 0:
            self._launches[step] = []
            await self._agree(agenda, bucket, comm)
        self._launches.setdefault(step, []).append(comm.launched)
        start = time.monotonic_ns()
        samples = self._draw_samples(agenda, bucket)
        is_checked = agenda.is_timed(step) and agenda.is_last(step)
        check = self._check(bucket, comm) if is_checked else None
        self._spend(start)
        average = await run(bucket, comm)
        start = time.monotonic_ns()
        if is_checked:
            self._measure_norms(bucket, average)
        if check is not None:
            self._errors |= await check.squares(average, comm)
        for group, sample in samples.items():
            await self._try(group, sample, comm, is_last=agenda.is_last(step))
        # Backward has ended: where it shares cores with the backend, messages would seem slower.
        if is_checked and bucket.is_last() and agenda.probe:
            self._probe = await probe(agenda.probe, bucket.buffer().device, comm, self._clock)
        self._spend(start)
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

    async def _agree(self, agenda: Agenda, bucket: GradBucket, comm: Communicator) -> None:
        """Send what is due at the beginning of this step: Note [One plan]."""
        start, device = time.monotonic_ns(), bucket.buffer().device
        if self._to_send is not None:
            if comm.rank == 0:
                self._to_send = self._to_send or pickle.dumps(self.control.decide(bucket.step))
            self._received = bucket.step, await _broadcast(self._to_send, comm, device)
        elif bucket.step >= agenda.report:
            report = pickle.dumps(self._report(agenda, comm.size))
            self._reports = bucket.step, await _gather(report, comm, device)
        self._spend(start)

    def _report(self, agenda: Agenda, size: int) -> Report:
        """Return what was measured on the agenda. Waits for the device."""
        report = Report(self._clock.cores(), (self._spent_ns - self._reported_ns) * 1e-9)
        report.probe = self._probe and self._probe()
        seconds = self._clock.seconds
        pairs = [(s, s + 1) for s in self._launches if agenda.is_timed(s) and s in self._ends]
        known = [(a, b) for a, b in pairs if self._launches.get(b)]
        if known:
            first = {s: moments[0] for s, moments in self._launches.items() if moments}
            report.step_seconds = median(seconds(first[a], first[b]) for a, b in known)
            report.forward_seconds = median(
                max(seconds(self._ends[a], first[b]), 0.0) for a, b in known
            )
            gaps = [list(starmap(seconds, pairwise(self._launches[a]))) for a, _ in known]
            report.launches = [0.0, *map(median, zip(*gaps, strict=True))]
        for (group, hook), (elements, run, squares) in self._outcomes.items():
            collectives = tuple(
                Collective(name, tensor_bytes(name, sent, size), ALL)
                for name, sent in run.collectives
            )
            error = relative_error(*squares.tolist())
            outcome = Outcome(group, hook, elements, run.local_seconds, collectives, error)
            report.outcomes.append(outcome)
        report.errors = [(i, relative_error(*s.tolist())) for i, s in self._errors.items()]
        report.norms = [(i, math.sqrt(float(square))) for i, square in self._norms.items()]
        return report

    # --------------------------------------------------------------------------------- measuring

    def _draw_samples(self, agenda: Agenda, bucket: GradBucket) -> dict[int, GradBucket]:
        """Return samples of the bucket's groups that hooks are tried on in this step."""
        if not agenda.is_trial(bucket.step):
            return {}
        groups = self.control.groups_of(bucket.names)
        return {
            i: draw_sample(
                bucket,
                groups[i].names,
                self._sample_size,
                index=index,
                is_last=index == len(agenda.trials) - 1,
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
            names = {group: sample.names}
            residual = partial(trial.residual, comm.size)
            check = Check.of(sample, names, residual, _CHECKED_IN_TRIALS) if is_last else None
            average = await observe(trial.average(sample, comm), run)
            if check is not None:
                squares = (await check.squares(average, comm))[group]
                self._outcomes[group, hook] = sample.buffer().numel(), run, squares

    def _check(self, bucket: GradBucket, comm: Communicator) -> Check | None:
        """Return what is compared of the hooks in use."""
        groups = self.control.groups_of(bucket.names).items()
        lossy = {i: group.names for i, group in groups if self.control.is_lossy(group)}
        return Check.of(bucket, lossy, partial(self._table.residual, comm.size), _CHECKED)

    def _measure_norms(self, bucket: GradBucket, average: Tensor) -> None:
        flat = average.view(-1)
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        views = {name: flat[i : i + length] for name, i, length in places}
        for i, group in self.control.groups_of(bucket.names).items():
            norms = torch._foreach_norm([views[name] for name in group.names])  # noqa: SLF001
            self._norms[i] = torch.stack(norms).double().square().sum()

    def _spend(self, start_ns: int) -> None:
        self._spent_ns += time.monotonic_ns() - start_ns


async def _gather(own: bytes, comm: Communicator, device: torch.device) -> list[Any]:
    """Return the objects of all ranks, given the pickled one of this rank."""
    length = torch.tensor([len(own)], device=device)
    lengths = (await comm.all_gather(length)).view(-1).tolist()
    padded = _tensor_of(own.ljust(max(lengths)), device)
    return [_object_of(each) for each in await comm.all_gather(padded)]


async def _broadcast(own: bytes, comm: Communicator, device: torch.device) -> Any:
    """Return the object of rank 0, given its pickled form there."""
    (length,) = (await comm.broadcast(torch.tensor([len(own)], device=device))).tolist()
    return _object_of(await comm.broadcast(_tensor_of(own.ljust(length), device)))


def _tensor_of(message: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)


def _object_of(message: Tensor) -> Any:
    return pickle.loads(bytes(message.tolist()))  # ignores what comes after the object
