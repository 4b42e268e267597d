"""The base of schedulers, which decide what the coroutines of a hook do next."""

from abc import ABC, abstractmethod

from torch import Tensor

from commhooks.comm.communicator import PendingCollective
from commhooks.comm.issue_order import in_turn
from commhooks.comm.stage_groups import StageGroups, StageKey
from commhooks.errors import CommHookError, CommHookPeerError
from commhooks.runtime.execution import HookExecution
from commhooks.runtime.waiters import Waiters


class Scheduler(ABC):
    """Advances each execution when its collective has completed, and issues collectives in turn.

    It has no thread, and blocks only where it connects a new stage group. All methods must be
    called on one thread, which calls :meth:`complete` with what ``waiters`` tell.

    Args:
        rank: This rank in the model's process group.
        groups: The stage groups to send through.
        waiters: What waits for collectives.
    """

    def __init__(self, rank: int, groups: StageGroups, waiters: Waiters) -> None:
        self.groups = groups
        self.waiters = waiters
        self.unfinished: list[HookExecution] = []
        """The executions that were run and have neither a result nor an error, in bucket order."""
        self._rank = rank
        self._under_way: dict[HookExecution, StageKey] = {}  # where their collectives are
        self._closed: dict[int, list[HookExecution]] = {}  # by epoch: those without connections

    def complete(self, key: StageKey) -> None:
        """Continue the execution whose collective on this stage group was the next to complete."""
        execution = next((each for each, own in self._under_way.items() if own == key), None)
        if execution is None:
            return  # aborted without waiting for its end
        error = execution.end_collective()
        self._mark_idle(execution)
        if execution.failure is not None:
            self._abort(execution, execution.failure)
        elif error is not None:
            self.abort(self._peer_error(execution, error))
        else:
            self._issue_in_turn()  # so that the stage group is in use while the hook computes
            if execution.failure is None:
                self._advance(execution)
                self._issue_in_turn()

    @abstractmethod
    def abort(self, error: CommHookError) -> None:
        """Abort what is unfinished on all ranks, here by :meth:`_abort_unfinished`."""

    def abort_because(self, what: str, cause: BaseException) -> None:
        """Abort with an error of this rank that says ``what`` happened because of ``cause``."""
        error = CommHookError(f"[rank {self._rank}] {what}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self.abort(error)

    def abort_without_peer(self, epoch: int) -> bool:
        """Abort because a peer has gone: Note [Messages that never end] in comm/peer_watch.py.

        Nothing is aborted if that has been noticed, or if all ranks may succeed nevertheless. What
        has been aborted but is still under way loses its connections now, and gets its error in
        the next call, a grace period later. Return whether no further call is needed.
        """
        for execution in self._closed.pop(epoch, ()):
            if execution in self._under_way:
                self._mark_idle(execution)
                assert execution.failure is not None
                self._abort(execution, execution.failure)
        waiting = [each for each in self._under_way if each.failure is None]
        if epoch == self.groups.epoch and waiting and self._needs_all_peers():
            error = RuntimeError("Connection closed by peer in the middle of a message")
            self.abort(self._peer_error(waiting[0], error))
        left = [each for each, key in self._under_way.items() if each.failure and key[0] == epoch]
        if left:
            self.groups.close_connections()
            self._closed[epoch] = left
        elif epoch != self.groups.epoch:
            self.waiters.end_epoch(epoch)
            return True
        return False

    def close(self) -> None:
        """End the waiting threads, and close all connections."""
        self.waiters.close()
        self.groups.abort()

    def _needs_all_peers(self) -> bool:
        """Return whether pending collectives fail on all ranks if a peer has gone."""
        return True

    @abstractmethod
    def _finish(self, execution: HookExecution, result: Tensor) -> None:
        """Set the result of an execution."""

    def _run(self, execution: HookExecution) -> None:
        """Run an execution, after those that have been run before."""
        self.unfinished.append(execution)
        self._advance(execution)
        self._issue_in_turn()

    def _advance(self, execution: HookExecution) -> None:
        """Run the coroutine to its next await, or to its end."""
        try:
            result = execution.step()
        except CommHookError as error:
            self.abort(error)
        else:
            if result is not None:
                self._finish(execution, result)

    def _issue_in_turn(self) -> None:
        """Issue what may be issued now: see Note [Order of collectives] in comm/issue_order.py."""
        for execution in in_turn(list(self.unfinished)):
            collective, execution.pending = execution.pending, None
            assert collective is not None
            self._issue(execution, collective)
            if execution.failure is not None:
                return

    def _issue(self, execution: HookExecution, collective: PendingCollective) -> None:
        stage = execution.count(collective)
        if collective.is_vote:
            stage = 0
        try:
            # No local variable may hold the stage group: abort() has to drop its last reference.
            execution.work = collective.start(self.groups.open(stage, collective.members))
        except CommHookPeerError as error:
            self.abort(self._peer_error(execution, error.with_traceback(None)))
            return
        except Exception as error:
            self.abort(execution.throw(error.with_traceback(None)))
            return
        key = (self.groups.epoch, collective.members, stage)
        self._under_way[execution] = key
        self.waiters.watch(key, execution.work)
        execution.count_bytes(collective)

    def _mark_idle(self, execution: HookExecution) -> None:
        """Note that nothing of ``execution`` is under way."""
        del self._under_way[execution]
        if execution.failure is not None:
            self.groups.drop_unused(self._under_way.values())

    def _abort_unfinished(self, error: CommHookError) -> None:
        """Abort each execution. If a collective is under way, its end sets the error."""
        for execution in list(self.unfinished):
            execution.failure = execution.failure or error
            execution.close()
            if execution.work is None:
                self._abort(execution, execution.failure)

    def _abort(self, execution: HookExecution, error: CommHookError) -> None:
        """Set the error of an execution that has nothing under way."""
        if execution in self.unfinished:
            self.unfinished.remove(execution)
        execution.abort(error)

    def _peer_error(self, execution: HookExecution, error: Exception) -> CommHookPeerError:
        return execution.peer_error(self.groups.published(), error)
