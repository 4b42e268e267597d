"""What a rank measures in a step: it times and checks hooks, tries others, and gathers reports."""

import functools
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.algorithms.adaptive.check import Check
from commhooks.algorithms.adaptive.control import Controller
from commhooks.algorithms.adaptive.groups import Layout, ParameterGroup
from commhooks.algorithms.adaptive.link_watch import PROBE_MESSAGES
from commhooks.algorithms.adaptive.observation import Observation, observe
from commhooks.algorithms.adaptive.sample import draw_sample
from commhooks.algorithms.adaptive.table import HookTable
from commhooks.algorithms.adaptive.timing import Moment, Times
from commhooks.algorithms.adaptive.trial import ExactAverage, Outcome, Trial
from commhooks.algorithms.adaptive.watch import Buckets, Watch
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookMismatchError
from reducer import GradBucket

__all__ = ["Measurement"]

_LEAST_SAMPLE, _MOST_SAMPLE, _SAMPLE_SHARE = 1 << 14, 1 << 20, 1 / 64
_LEAST_CPU_BYTES = 1 << 20
"""Of a probe whose time on cores counts. Of a smaller one, much of it is that of messages."""

_Run = Callable[[GradBucket, Communicator], Coroutine[Any, Any, Tensor]]


@dataclass
class _Gathered:
    """What ranks have gathered in this step, of all ranks."""

    step: int = -1
    digests: Tensor | None = None
    """Of the proposed plan and the schedule."""
    reports: Tensor | None = None


class Measurement:
    """Does what ``control`` has decided for a step, and notes what it finds in its window.

    Args:
        control: Decides which step measures what.
        trials: For each hook that is tried.
        table: Which hook each parameter has.
        elements: Of the model.
        layout_of: Returns the layout of buckets.
        times: Of the device of the gradients.
    """

    def __init__(
        self,
        control: Controller,
        trials: Mapping[int, Trial],
        table: HookTable,
        elements: int,
        layout_of: Callable[[Buckets], Layout],
        times: Times,
    ) -> None:
        self.control = control
        self.spent_ns = 0
        """What measuring and planning has taken so far, waiting for peers included."""
        self._elapsed_ns = 0
        self._first_ns = 0
        self._trials = trials
        self._table = table
        self._sample_size = int(min(max(elements * _SAMPLE_SHARE, _LEAST_SAMPLE), _MOST_SAMPLE))
        self._layout_of = layout_of
        self._times = times
        self._watch = Watch(times)
        self._gathered = _Gathered()
        self._trying: list[tuple[ParameterGroup, int, int]] = []
        """The trials of this step, until their bucket comes."""

    def metrics(self) -> dict[str, float]:
        """Return what the controller knows, and the share of the time that this has taken."""
        share = {"planning_share": self.spent_ns / self._elapsed_ns} if self._elapsed_ns else {}
        return self.control.metrics() | share

    def begin_step(self, step: int, launched: Moment) -> bool:
        """Use what the last step has brought, and return whether there is a new plan.

        Nothing here waits for another rank. Raises CommHookMismatchError on all ranks, and forgets
        everything, if they have different plans.
        """
        start = time.monotonic_ns()
        self._first_ns = self._first_ns or start
        self._elapsed_ns = start - self._first_ns
        has_new_plan = self._agree(step)
        self.spent_ns += time.monotonic_ns() - start
        self._times.settle(wait=False)
        buckets = self._watch.begin_step(step, launched, self.control.window)
        if buckets is not None and not self.control.has_buckets(buckets):
            self.control.use_layout(self._layout_of(buckets), step)
            # With what a device has yet to tell of the steps before.
            self._times.when_known((), self.control.window.clear_times)
        self._trying = self.control.trials(step)
        return has_new_plan

    async def around(self, run: _Run, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Await the average of a bucket, with what is to be measured before and after it."""
        control = self.control
        self._watch.bucket(bucket, comm.launched, control.window)
        if bucket.index() == 0:
            await self._gather(bucket, comm)
        trying, sample = self._next_trials(bucket, comm.size)
        is_checked = control.reports(bucket.step + 1)
        check = self._draw_check(bucket, comm.size) if is_checked else None
        average = await run(bucket, comm)
        if is_checked:
            self._measure_norms(bucket, average)
        if check is not None:
            await self._finish_check(check, average, comm)
        if sample is not None:
            await self._try(trying, sample, comm, are_first=control.are_first_trials(bucket.step))
        # Backward has ended: where it shares cores with the backend, messages would seem slower.
        if bucket.is_last() and (elements := control.probe_elements(bucket.step)):
            await self._probe(elements, bucket.buffer().device, comm)
        self._watch.end_bucket()  # what has been measured here is not part of the next forward
        return average

    async def observed(self, run: Coroutine[Any, Any, Tensor], hook: int, elements: int) -> Tensor:
        """Await a run of a hook in use, and note what it took."""
        window, seen = self.control.window, self._observation()

        def note() -> None:
            window.runs.setdefault(hook, []).append((elements, seen.local_seconds))

        found: Tensor = await observe(run, seen)
        self._times.when_known((), note)
        return found

    def recover(self) -> None:
        """Forget the step that has failed on some rank."""
        self._times.forget()
        self._watch.recover()
        self.control.recover()
        for trial in self._trials.values():
            trial.recover()

    def _agree(self, step: int) -> bool:
        """Use what ranks have gathered in the last step; see Note [The same plan]."""
        gathered, self._gathered = self._gathered, _Gathered(step)
        if gathered.step == step:
            return False
        control, digests, reports = self.control, gathered.digests, gathered.reports
        try:
            has_new_plan = digests is not None and control.confirm(digests.view(-1).tolist())
            if reports is not None:
                control.take(reports.tolist(), gathered.step, step)
        except CommHookMismatchError:
            self.control = control.new()
            raise
        return has_new_plan

    async def _gather(self, bucket: GradBucket, comm: Communicator) -> None:
        """Send what is due at the beginning of this step."""
        control, device = self.control, bucket.buffer().device
        if control.awaits_confirmation:
            digest = torch.tensor([control.digest]).to(device)
            self._gathered.digests = await comm.all_gather(digest)
        if control.reports(bucket.step):
            self._times.settle(wait=True)
            start = time.monotonic_ns()
            found = control.encode(bucket.step, self._times.cores())
            numbers = torch.tensor(found, dtype=torch.float64).to(device)
            seconds, seen = (time.monotonic_ns() - start) * 1e-9, self._observation()
            self._gathered.reports = await observe(_all_gather(numbers, comm), seen)
            self._spend(lambda: seconds + seen.link_seconds, control.window.report_seconds)

    def _observation(self) -> Observation:
        return Observation(self.control.window.links.add, self._times)

    def _next_trials(
        self, bucket: GradBucket, size: int
    ) -> tuple[Mapping[int, int], GradBucket | None]:
        """Return the hooks to try on this bucket, by the number of the trial, and a sample."""
        if not self._trying or not set(self._trying[0][0].names) <= set(bucket.names):
            return {}, None
        group, _, first = self._trying[0]
        hooks = {number: hook for _, hook, number in self._trying}
        self._trying = []
        sample = draw_sample(
            bucket,
            group.names,
            functools.partial(self._table.residual, size),
            self._sample_size,
            first,
        )
        return hooks, sample

    def _draw_check(self, bucket: GradBucket, size: int) -> Check | None:
        start = self._times.work()
        groups = [
            each for each in self.control.groups_of(bucket.names) if self.control.is_lossy(each[1])
        ]
        check = Check.of(bucket, groups, functools.partial(self._table.residual, size))
        noted = self.control.window.check_seconds
        self._times.when_known(
            (start, self._times.work()),
            lambda start_ns, end_ns: self._note(1e-9 * (end_ns - start_ns), noted),
        )
        return check

    async def _finish_check(self, check: Check, average: Tensor, comm: Communicator) -> None:
        seen = self._observation()
        squares = await observe(check.squares(average.view(-1), comm), seen)
        self.control.window.checks.update(squares)
        self._spend(
            lambda: seen.link_seconds + seen.local_seconds, self.control.window.check_seconds
        )

    async def _try(
        self, hooks: Mapping[int, int], sample: GradBucket, comm: Communicator, *, are_first: bool
    ) -> None:
        window = self.control.window
        add, times = window.links.add, self._times
        exact = await ExactAverage.of(sample, comm, add, times)
        self._spend(lambda: exact.seconds)
        for number, hook in hooks.items():
            trial = self._trials[hook]
            outcome = await trial.run(sample, comm, add, exact, times, twice=are_first)
            window.trials[number] = outcome
            self._note_trial(exact, outcome)

    def _note_trial(self, exact: ExactAverage, outcome: Outcome) -> None:
        noted = self.control.window.trial_seconds
        self._spend(lambda: outcome.seconds)
        self._times.when_known(
            (),
            lambda: noted.append(exact.seconds + outcome.seconds),  # as if it were alone
        )

    async def _probe(self, elements: int, device: torch.device, comm: Communicator) -> None:
        """Average zeros, so that the link can be seen; see link_watch.py."""
        window = self.control.window
        seen = Observation(window.probes.add, self._times)
        zeros = torch.zeros(elements, device=device)
        start = time.process_time()
        for _ in range(PROBE_MESSAGES):
            await observe(_all_reduce(zeros, comm), seen)
        cpu_seconds = time.process_time() - start

        def note() -> None:
            self._note(seen.link_seconds, window.probe_seconds)
            sent = sum(each.wire_bytes for each in seen.collectives)
            if sent >= _LEAST_CPU_BYTES:
                window.byte_cpu_seconds.append(cpu_seconds / sent)

        self._times.when_known((), note)

    def _spend(self, seconds: Callable[[], float], noted: list[float] | None = None) -> None:
        """Note, once they are known, seconds that measuring has taken."""
        self._times.when_known((), lambda: self._note(seconds(), noted))

    def _note(self, seconds: float, noted: list[float] | None) -> None:
        self.spent_ns += int(seconds * 1e9)
        if noted is not None:
            noted.append(seconds)

    def _measure_norms(self, bucket: GradBucket, average: Tensor) -> None:
        flat = average.view(-1)
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        views = {name: flat[i : i + length] for name, i, length in places}
        for i, group in self.control.groups_of(bucket.names):
            of_group = [views[name] for name in group.names]
            norms = torch._foreach_norm(of_group)  # noqa: SLF001
            self.control.window.squares[i] = torch.stack(norms).double().square().sum()


async def _all_reduce(message: Tensor, comm: Communicator) -> Tensor:
    return await comm.all_reduce(message)


async def _all_gather(message: Tensor, comm: Communicator) -> Tensor:
    return await comm.all_gather(message)
