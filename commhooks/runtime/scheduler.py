"""Runs the executions of one hook side by side, so that all ranks agree on order and outcome.

Note [All ranks or none]
~~~~~~~~~~~~~~~~~~~~~~~~
A step that fails on one rank must fail on all; otherwise the models would silently diverge. A step
therefore ends with a vote after its last bucket: a barrier, which a rank enters when all its
buckets have finished. When the barrier completes, all buckets have finished on all ranks. The
bucket that ``is_last()`` votes; where nobody knows which one is, ``end_step()`` of the runner does.
A rank that fails, at whatever point,

    1. publishes the reason in the store, under the current epoch;
    2. abandons its stage groups. Their connections close, and what peers have pending on them
       fails, so the peers do the same. (The rank that has issued the fewest collectives on a stage
       group has none pending there that others lack, so it can close; then those of the others
       fail.)
    3. sets an error in the future of a bucket only when nothing of that bucket is pending, so that
       its buffer is no longer in use;
    4. increments its epoch. No rank gets past the vote, so every rank does this exactly once in
       the failed step, and the next step meets on new stage groups.

If a hook has sent nothing in a step, there is no vote.
"""

import itertools
from collections.abc import Callable

from torch._C._distributed_c10d import Work

from commhooks.comm.communicator import PendingCollective
from commhooks.comm.issue_order import in_turn
from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError, CommHookPeerError
from commhooks.hook.base import CommHook
from commhooks.runtime.execution import HookExecution
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stats import StatsCollector
from commhooks.runtime.step_state import Phase, StepState

__all__ = ["HookScheduler"]


class HookScheduler:
    """Advances each execution when its collective has completed, and issues collectives in turn.

    It has no thread and blocks only where it connects a new stage group. All methods must be called
    on one thread, with the stream of ``stream`` as the current one.

    Args:
        hook: The hook that the executions run.
        rank: This rank in the model's process group.
        groups: The stage groups to send through.
        stream: The stream on which the executions run.
        collector: Gets the record of each execution that succeeds.
        watch: Called with a work, a token and a stage. Must arrange that :meth:`complete` is called
            with the token when the work has completed, with or without an error.
    """

    def __init__(
        self,
        hook: CommHook,
        rank: int,
        groups: StageGroups,
        stream: SideStream,
        collector: StatsCollector,
        watch: Callable[[Work, int, int], None],
    ) -> None:
        self._hook = hook
        self._rank = rank
        self._groups = groups
        self._stream = stream
        self._collector = collector
        self._watch = watch
        self._tokens = itertools.count()
        self._under_way: dict[int, HookExecution] = {}  # by the token of their collective
        self._unfinished: list[HookExecution] = []  # in bucket order
        self._state = StepState()

    def launch(self, execution: HookExecution) -> None:
        """Run an execution, after those of the earlier buckets of the step."""
        if execution.bucket.index() == 0 or self._state.phase is Phase.IDLE:
            self._begin_step()
        if self._state.failure is not None:
            execution.close()
            execution.fail(self._state.failure)
            return
        self._stream.follow(execution.mark, execution.bucket.buffer())
        self._unfinished.append(execution)
        self._advance(execution)
        self._issue_in_turn()

    def complete(self, token: int) -> None:
        """Continue the execution whose collective has completed."""
        execution = self._under_way.pop(token)
        error = execution.end_collective()
        if self._state.failure is not None:
            self._set_error(execution, self._state.failure)
        elif error is not None:
            self.fail(self._peer_error(execution, error))
        else:
            self._advance(execution)
            self._issue_in_turn()

    def end_early(self) -> None:
        """End the step although buckets are missing: those on their way fail, on all ranks.

        Nothing happens if no bucket has been launched, because then no peer waits for this rank.
        """
        if self._state.phase in (Phase.OPEN, Phase.SENDING):
            text = f"[rank {self._rank}] the backward pass ended before its last bucket"
            self.fail(CommHookError(text))

    def fail(self, error: CommHookError) -> None:
        """Fail the step, on all ranks: see Note [All ranks or none]."""
        try:
            if self._state.phase is not Phase.FAILED:
                self._state.fail(error)
                self._groups.publish(str(error))
                self._groups.abandon()
        finally:
            for execution in list(self._unfinished):
                execution.close()
                if execution.work is None:
                    self._set_error(execution, error)

    def error(self, what: str, cause: BaseException) -> CommHookError:
        """Return an error of this rank that says ``what`` happened because of ``cause``."""
        error = CommHookError(f"[rank {self._rank}] {what}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _begin_step(self) -> None:
        if not self._state.begin():
            return
        try:
            self._hook.recover()
        except BaseException as error:
            self.fail(self.error(f"recover() of hook {self._hook!r} failed", error))

    def _advance(self, execution: HookExecution) -> None:
        """Run the hook to its next await or to its end."""
        try:
            result = execution.step()
        except CommHookError as error:
            self.fail(error)
            return
        if result is None:
            return
        execution.record(self._collector)  # if it raises, the step fails
        self._unfinished.remove(execution)
        if execution.bucket.is_last():
            self._state.finish()
        execution.future.set_result(result)

    def _issue_in_turn(self) -> None:
        """Issue what may be issued now: see Note [Order of collectives] in comm/issue_order.py."""
        for execution in in_turn(list(self._unfinished)):
            collective, execution.pending = execution.pending, None
            assert collective is not None
            if collective.is_vote and self._state.phase is Phase.OPEN:
                self._advance(execution)
            else:
                self._issue(execution, collective)
            if self._state.failure is not None:
                return

    def _issue(self, execution: HookExecution, collective: PendingCollective) -> None:
        self._state.send()
        stage = execution.count(collective)
        if collective.is_vote:
            stage = 0
        try:
            # No local variable may hold the stage group: abandon() has to drop its last reference.
            execution.work = collective.start(self._groups.open(stage, collective.members))
        except CommHookPeerError as error:
            self.fail(self._peer_error(execution, error.with_traceback(None)))
            return
        except Exception as error:
            self.fail(execution.refuse(error.with_traceback(None)))
            return
        token = next(self._tokens)
        self._under_way[token] = execution
        self._watch(execution.work, token, stage)
        execution.count_bytes(collective)

    def _set_error(self, execution: HookExecution, error: CommHookError) -> None:
        self._unfinished.remove(execution)
        execution.fail(error)

    def _peer_error(self, execution: HookExecution, error: Exception) -> CommHookError:
        return execution.peer_error(self._groups.published(), error)
