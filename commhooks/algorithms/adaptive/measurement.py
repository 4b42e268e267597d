"""What a rank does for ``auto`` in a step: it measures what is on the agenda, and reports it."""

import math
import pickle
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from itertools import pairwise, starmap
from statistics import median
from typing import Any

import torch
from torch import Tensor

from commhooks.algorithms.adaptive.check import Check
from commhooks.algorithms.adaptive.control import Controller, backend_of, network_of
from commhooks.algorithms.adaptive.groups import Buckets, Layout
from commhooks.algorithms.adaptive.messages import (
    Agenda,
    Instructions,
    Probe,
    Report,
    TrialRecord,
)
from commhooks.algorithms.wrappers.table import HookTable
from commhooks.algorithms.wrappers.timing import Clock, Moment, Run, observe
from commhooks.algorithms.wrappers.trial import (
    ExactAverage,
    Outcome,
    Trial,
    draw_sample,
    relative_error,
)
from commhooks.comm.communicator import Communicator
from commhooks.costs.step_trace import Collective, Members
from reducer import GradBucket

__all__ = ["Measurement"]

_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLE_SHARE = 1 << 14, 1 << 20, 1 / 64
_ROUNDS, _MESSAGES = 6, 3
"""Of a probe: small messages, and long ones, of which the first only fills the buffers."""
_MOST_ROUNDS = 1 / 8
"""Of the time of a long message: late threads must not make the link seem faster by a fifth."""

_Run = Callable[[GradBucket, Communicator], Coroutine[Any, Any, Tensor]]


class Measurement:
    """Does what is on the agenda of ``control``.

    Args:
        control: Knows what was reported, and decides on rank 0.
        trials: For each hook that is tried.
        table: Which hook each parameter has.
        elements: Of the model.
        layout_of: Returns the layout of buckets.
        clock: Of the device of the gradients.
    """

    def __init__(
        self,
        control: Controller,
        trials: Mapping[int, Trial],
        table: HookTable,
        elements: int,
        layout_of: Callable[[Buckets], Layout],
        clock: Clock,
    ) -> None:
        self.control = control
        self._trials = trials
        self._table = table
        self._sample_size = int(min(max(elements * _SAMPLE_SHARE, _LEAST_SAMPLE), _MOST_SAMPLE))
        self._layout_of = layout_of
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
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._errors: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self._runs: dict[int, tuple[int, Run]] = {}
        self._probe: Callable[[], Probe] | None = None
        self._reported_ns = self._spent_ns

    @property
    def planning_seconds(self) -> float:
        """What measuring and planning has taken so far, waiting for peers included."""
        return self._spent_ns * 1e-9

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
        self._spent_ns += time.monotonic_ns() - start
        return has_new_plan

    def _look_at_buckets(self, step: int) -> None:
        """Measure from the beginning if the same new buckets came twice."""
        finished, former = tuple(self._buckets), self._former
        self._former = finished
        if finished and finished == former and not self.control.has_buckets(finished):
            self.control.use_layout(self._layout_of(finished), step)
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
        tried, sample = self._draw_sample(agenda, bucket, comm.size)
        is_checked, check = agenda.is_checked(step), None
        if is_checked:
            lossy = filter(
                lambda pair: self.control.is_lossy(pair[1]), self.control.groups_of(bucket.names)
            )
            check = Check.of(bucket, lossy, partial(self._table.residual, comm.size))
        self._spend(start)
        average = await run(bucket, comm)
        start = time.monotonic_ns()
        if is_checked:
            self._measure_norms(bucket, average)
        if check is not None:
            self._errors |= await check.squares(average.view(-1), comm)
        if sample is not None:
            await self._try(tried, sample, comm, are_first=step == agenda.start)
        # Backward has ended: where it shares cores with the backend, messages would seem slower.
        if is_checked and bucket.is_last() and agenda.probe:
            self._probe = await self._measure_link(agenda.probe, bucket.buffer().device, comm)
        self._spend(start)
        self._ends[step] = self._clock.now()
        return average

    async def observed(self, run: Coroutine[Any, Any, Tensor], hook: int, elements: int) -> Tensor:
        """Await a run of a hook in use, and note what it took."""
        agenda = self.control.agenda
        if agenda is None or not agenda.is_timed(self._step):
            return await run
        noted = Run(self._clock)
        found = await observe(run, noted)
        if elements >= self._runs.get(hook, (0, None))[0]:
            self._runs[hook] = elements, noted
        return found

    def recover(self) -> None:
        """Forget the times of the step that has failed on some rank."""
        self._launches.clear()
        self._ends.clear()
        for trial in self._trials.values():
            trial.recover()

    # --------------------------------------------------------------------------------- agreement

    async def _agree(self, agenda: Agenda, bucket: GradBucket, comm: Communicator) -> None:
        """Send what is due at the beginning of this step: Note [One plan]."""
        start, device = time.monotonic_ns(), bucket.buffer().device
        if self._to_send is not None:
            if comm.rank == 0:
                self._to_send = self._to_send or pickle.dumps(self.control.decide(bucket.step))
            self._received = bucket.step, await _broadcast(self._to_send, comm, device)
        elif bucket.step >= agenda.report:
            report = pickle.dumps(self._report(agenda))
            self._reports = bucket.step, await _gather(report, comm, device)
        self._spend(start)

    def _report(self, agenda: Agenda) -> Report:
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
            steps = [self._launches[a] for a, _ in known]
            gaps = [list(starmap(seconds, pairwise(each))) for each in steps]
            report.launches = [0.0, *map(median, zip(*gaps, strict=True))]
        for (group, hook), outcome in self._outcomes.items():
            local, ops = outcome.run.local_seconds, outcome.run.collectives
            stages = [(local[i], name, float(sent)) for i, (name, sent) in enumerate(ops)]
            exact = sum(outcome.exact.local_seconds)
            report.trials.append(
                TrialRecord(group, hook, outcome.error, outcome.elements, stages, local[-1], exact)
            )
        report.errors = [(i, relative_error(*s.tolist())) for i, s in self._errors.items()]
        report.norms = [(i, math.sqrt(float(square))) for i, square in self._norms.items()]
        report.runs = [(i, n, sum(run.local_seconds)) for i, (n, run) in self._runs.items()]
        return report

    # --------------------------------------------------------------------------------- measuring

    def _draw_sample(
        self, agenda: Agenda, bucket: GradBucket, size: int
    ) -> tuple[int, GradBucket | None]:
        """Return the group that hooks are tried on in this step, and a sample if it is here."""
        group, layout = agenda.trial(bucket.step), self.control.layout
        if group is None or layout is None:
            return -1, None
        names = layout.groups[group].names
        if not set(names) <= set(bucket.names):
            return -1, None
        residual = partial(self._table.residual, size)
        return group, draw_sample(bucket, names, residual, self._sample_size)

    async def _try(
        self, group: int, sample: GradBucket, comm: Communicator, *, are_first: bool
    ) -> None:
        exact = await ExactAverage.of(sample, comm, self._clock)
        for hook in self.control.hooks_to_try(group):
            twice = are_first and not self.control.is_known(hook)
            outcome = await self._trials[hook].run(sample, comm, exact, self._clock, twice=twice)
            self._outcomes[group, hook] = outcome

    async def _measure_link(
        self, elements: int, device: torch.device, comm: Communicator
    ) -> Callable[[], Probe]:
        """Average zeros, so that the link can be seen. All ranks begin with the first round."""
        zeros = torch.zeros(elements, device=device)
        moments = [self._clock.now()]
        for _ in range(_ROUNDS):
            await comm.all_reduce(torch.zeros(1, device=device))
            moments.append(self._clock.now())
        cpu = time.process_time()
        for _ in range(_MESSAGES):
            await comm.all_reduce(zeros)
            moments.append(self._clock.now())
        cpu = time.process_time() - cpu
        backend = comm.group._get_backend(device).name()  # noqa: SLF001
        return partial(_probe_of, self._clock, moments, cpu, zeros.nbytes, backend, comm.size)

    def _measure_norms(self, bucket: GradBucket, average: Tensor) -> None:
        flat = average.view(-1)
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        views = {name: flat[i : i + length] for name, i, length in places}
        for i, group in self.control.groups_of(bucket.names):
            norms = torch._foreach_norm([views[name] for name in group.names])  # noqa: SLF001
            self._norms[i] = torch.stack(norms).double().square().sum()

    def _spend(self, start_ns: int) -> None:
        self._spent_ns += time.monotonic_ns() - start_ns


def _probe_of(
    clock: Clock, moments: list[Moment], cpu: float, nbytes: int, backend: str, size: int
) -> Probe:
    """Return the costs of messages. Waits for the device."""
    took = list(starmap(clock.seconds, pairwise(moments)))
    one, long = (
        backend_of(backend).cost(
            Collective("all_reduce", float(each), Members(1, spans_nodes=True)),
            network_of(1.0, 0.0, size),  # so that seconds are rounds
        )
        for each in (4, nbytes)
    )
    round_seconds = min(took[1:_ROUNDS]) / max(one.latency_seconds, 1.0)
    seconds = sum(took[_ROUNDS + 1 :]) / (_MESSAGES - 1)
    sending = max(seconds - round_seconds * long.latency_seconds, (1 - _MOST_ROUNDS) * seconds)
    sent = max(long.link_bytes, 1.0)
    return Probe(round_seconds, sending / sent, cpu / _MESSAGES / sent)


async def _gather(own: bytes, comm: Communicator, device: torch.device) -> list[Any]:
    """Return the objects of all ranks, given the pickled one of this rank."""
    length = torch.tensor([len(own)], device=device)
    lengths = (await comm.all_gather(length)).view(-1).tolist()
    padded = _tensor_of(own.ljust(max(lengths)), device)
    return [_object_of(row) for row in await comm.all_gather(padded)]


async def _broadcast(own: bytes, comm: Communicator, device: torch.device) -> Any:
    """Return the object of rank 0, given its pickled form there."""
    (length,) = (await comm.broadcast(torch.tensor([len(own)], device=device))).tolist()
    return _object_of(await comm.broadcast(_tensor_of(own.ljust(length), device)))


def _tensor_of(message: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)


def _object_of(message: Tensor) -> Any:
    return pickle.loads(bytes(message.tolist()))  # ignores what comes after the object
