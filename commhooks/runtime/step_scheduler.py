"""Runs the executions of a step, so that all ranks agree on order and outcome.

Note [All ranks or none]
~~~~~~~~~~~~~~~~~~~~~~~~
A step that fails on one rank must fail on all; otherwise the models would silently diverge. A step
therefore ends with a vote after its last bucket: a barrier, which a rank enters when all its
buckets have finished. When the barrier completes, all buckets have finished on all ranks. The
bucket that ``is_last()`` votes; where it is not known which one is, ``end_step()`` of the runner
does. A rank that fails, at whatever point,

    1. publishes the reason in the store, under the current epoch;
    2. aborts its stage groups. Their connections close, and what peers have pending on them
       fails, so the peers do the same. (The rank that has issued the fewest collectives on a stage
       group has none pending there that others lack, so it can close; then those of the others
       fail.)
    3. sets an error in the future of a bucket only when nothing of that bucket is pending, so that
       its buffer is no longer in use;
    4. increments its epoch. No rank gets past the vote, so every rank does this exactly once in
       the failed step, and the next step meets on new stage groups.

If a hook has sent nothing in a step, there is no vote.
"""

import functools
import weakref
from enum import Enum, auto

import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import PendingCollective
from commhooks.comm.exchange import NOT_BEGUN, Exchange
from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.runtime.exchange_scheduler import ExchangeScheduler
from commhooks.runtime.execution import ExchangeExecution, HookExecution
from commhooks.runtime.hook_thread import HookThread
from commhooks.runtime.scheduler import Scheduler
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stats import StatsCollector
from commhooks.runtime.waiters import Waiters


class Phase(Enum):
    """The progress of a step on this rank; see :class:`StepState`."""

    IDLE = auto()
    """No bucket of a step has arrived."""
    OPEN = auto()
    """Buckets have arrived, but nothing has been sent: other ranks do not wait for this one."""
    SENDING = auto()
    """A collective has been issued, so the step ends with a vote or a failure on all ranks."""
    FAILED = auto()
    """Buckets that still arrive fail as well."""


class StepState:
    """One phase, and the only code that changes it.

    The method in each row leads from the phase in the column to the phase in the cell; an empty
    cell is a bug in the runner, and raises RuntimeError:

    ========= ======== ========= ========= ========
    ..        IDLE     OPEN      SENDING   FAILED
    ========= ======== ========= ========= ========
    begin()   OPEN     OPEN      OPEN      OPEN
    send()             SENDING   SENDING
    finish()           IDLE      IDLE
    fail()    FAILED   FAILED    FAILED
    ========= ======== ========= ========= ========

    A step begins with the bucket of index 0. That may happen in OPEN and SENDING because torch does
    not tell when a backward pass has raised.

    An exchange that outlives a step is in none of these phases: the state is that of a step only.
    """

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.failure: CommHookError | None = None
        """Why the step failed. Set in FAILED only."""

    def begin(self) -> bool:
        """Begin a step. Return whether the one before it failed."""
        has_failed = self.phase is Phase.FAILED
        self.phase = Phase.OPEN
        self.failure = None
        return has_failed

    def send(self) -> None:
        """Note that a collective is about to be issued."""
        self._move(Phase.SENDING, _RUNNING)

    def finish(self) -> None:
        """Note that the step has ended on all ranks."""
        self._move(Phase.IDLE, _RUNNING)

    def fail(self, failure: CommHookError) -> None:
        """Note that the step has failed, because of ``failure``."""
        self._move(Phase.FAILED, _NOT_FAILED)
        self.failure = failure

    def _move(self, target: Phase, sources: frozenset[Phase]) -> None:
        if self.phase not in sources:
            raise RuntimeError(f"a step cannot go from {self.phase.name} to {target.name}")
        self.phase = target


_RUNNING = frozenset({Phase.OPEN, Phase.SENDING})
_NOT_FAILED = frozenset(Phase) - {Phase.FAILED}


class StepScheduler(Scheduler):
    """Runs the executions of step after step.

    Args:
        hook: The hook that the executions run.
        group: The model's process group.
        groups, waiters: See :class:`Scheduler`.
        stream: The stream on which the executions run; the current one in all calls.
        collector: Gets the record of each execution that succeeds.
        exchanges: What runs the exchanges that the hook begins, on a thread of its own.
        thread: That thread.
    """

    def __init__(
        self,
        hook: CommHook,
        group: dist.ProcessGroup,
        groups: StageGroups,
        waiters: Waiters,
        stream: SideStream,
        collector: StatsCollector,
        exchanges: ExchangeScheduler,
        thread: HookThread,
    ) -> None:
        super().__init__(group.rank(), groups, waiters)
        self._hook = hook
        self._group = group
        self._stream = stream
        self._collector = collector
        self._exchanges = exchanges
        self._thread_of_exchanges = thread
        self._state = StepState()
        self._has_voted = False  # in this step
        self._handed_over: list[HookExecution] = []  # executions of this step, with exchanges
        self._begun: weakref.WeakSet[Exchange] = weakref.WeakSet()  # and not aborted

    def launch(self, execution: HookExecution) -> None:
        """Run an execution, after those of the earlier buckets of the step."""
        if execution.bucket.index() == 0 or self._state.phase is Phase.IDLE:
            self._begin_step()
        if self._state.failure is not None:
            self._abort(execution, self._state.failure)
            return
        self._stream.follow(execution.mark, execution.bucket.buffer())
        self._run(execution)

    def continue_after(self, ended: HookExecution) -> None:
        """Continue the executions that wait for an exchange, which has ended."""
        ended.record(self._collector)
        for execution in list(self.unfinished):
            self._take_results(execution)
        self._issue_in_turn()

    def abort_incomplete(self, has_run: bool) -> None:
        """Abort the step although buckets are missing: those on their way fail, on all ranks.

        Without ``has_run`` none has been launched on this rank, but peers may be ahead. Otherwise
        nothing happens if the step has ended.
        """
        if not has_run:
            self._begin_step()
        if self._state.phase in (Phase.OPEN, Phase.SENDING):
            text = f"[rank {self._group.rank()}] the backward pass ended before its last bucket"
            self.abort(CommHookError(text))

    def abort(self, error: CommHookError) -> None:
        """Abort the step, on all ranks: see Note [All ranks or none]."""
        try:
            if self._state.phase is not Phase.FAILED:
                self._state.fail(error)
                self._begun.clear()
                self.groups.publish(str(error))
                self.groups.abort(self._under_way.values())
                self._abort_exchanges(error)
                self._stream.synchronize()  # Note [Streams and lifetimes] in side_stream.py, 5
        finally:
            self._abort_unfinished(error)

    def _needs_all_peers(self) -> bool:
        """No rank gets past the vote before this one has issued it."""
        return self._state.phase is Phase.SENDING and not self._has_voted

    def _issue(self, execution: HookExecution, collective: PendingCollective) -> None:
        """Leave out the vote of a step in which nothing was sent, awaited or handed over."""
        if collective.is_vote and self._state.phase is Phase.OPEN and not execution.comm.begun:
            self._advance(execution)
            return
        self._state.send()
        self._has_voted = self._has_voted or collective.is_vote
        super()._issue(execution, collective)

    def _advance(self, execution: HookExecution) -> None:
        super()._advance(execution)
        self._take_results(execution)

    def _take_results(self, execution: HookExecution) -> None:
        """Run the coroutine on while what it awaits is an exchange that has a result."""
        while execution.failure is None and (exchange := execution.exchange) is not None:
            self._state.send()  # so that the step ends with a vote
            if exchange not in self._begun:
                self.abort(execution.error(NOT_BEGUN))
                return
            if not exchange.is_over:
                return
            try:
                exchange.result()
            except CommHookError as error:
                self.abort(type(error)(*error.args))
                return
            super()._advance(execution)

    def _finish(self, execution: HookExecution, result: Tensor) -> None:
        """Record what the execution has cost, and end the step after its last one."""
        execution.record(self._collector)  # if it raises, the step fails
        self.unfinished.remove(execution)
        if execution.comm.begun:
            self._state.send()  # so that all ranks learn whether the step has succeeded
            self._handed_over.append(execution)
        if execution.bucket.is_last():
            self._state.finish()
            self._begin_exchanges()
        execution.future.set_result(result)

    def _begin_step(self) -> None:
        self._has_voted = False
        self._handed_over.clear()
        if not self._state.begin():
            return
        self._thread_of_exchanges.wait()  # they no longer change the hook's state
        try:
            self._hook.recover()
        except BaseException as error:
            self.abort_because(f"recover() of hook {self._hook!r} failed", error)

    def _begin_exchanges(self) -> None:
        if not self._handed_over:
            return
        begun = []
        for execution in sorted(self._handed_over, key=lambda each: each.bucket.index()):
            self._begun.update(execution.comm.begun)
            begun += [ExchangeExecution(each, execution) for each in execution.comm.begun]
        self._handed_over.clear()
        self._thread_of_exchanges.call(functools.partial(self._exchanges.begin, begun))

    def _abort_exchanges(self, error: CommHookError) -> None:
        abort = functools.partial(self._exchanges.abort_for_step, error)
        if self._thread_of_exchanges.is_alive():
            self._exchanges.groups.publish(str(error))  # at once: the thread may wait for peers
            self._thread_of_exchanges.call(abort)
        else:
            abort()
