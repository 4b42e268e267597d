"""Runs executions side by side on one thread, and issues their collectives in turn."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable

from torch import Tensor
from torch._C._distributed_c10d import Work

from commhooks.comm.communicator import PendingCollective
from commhooks.comm.exchange import Exchange
from commhooks.comm.issue_order import in_turn
from commhooks.comm.stage_groups import StageGroups, StageKey
from commhooks.errors import CommHookError, CommHookPeerError
from commhooks.runtime.execution import HookExecution

Watch = Callable[[Work, Callable[[], None], Hashable], None]
"""Called with a work, a function and a key of the stage group. Must arrange that the function is
called on the executor's thread when the work has completed, with or without an error."""


class Owner(ABC):
    """The scheduler that owns an executor and decides the meaning of results and errors."""

    @abstractmethod
    def fail(self, error: CommHookError) -> None:
        """Fail what is unfinished on all ranks, here by :meth:`Executor.fail_all`."""

    def needs_all_peers(self) -> bool:
        """Return whether pending collectives fail on all ranks if a peer has gone."""
        return True

    def may_issue(self, execution: HookExecution, collective: PendingCollective) -> bool:  # noqa: ARG002
        """Return whether to issue a collective; otherwise the execution continues without it."""
        return True

    @abstractmethod
    def take(self, execution: HookExecution, exchange: Exchange) -> bool:
        """Return whether an exchange that an execution awaits has a result, or fail."""

    @abstractmethod
    def finish(self, execution: HookExecution, result: Tensor) -> None:
        """Set the result of an execution."""

    def drop(self, execution: HookExecution) -> None:  # noqa: B027
        """Note that the error of an execution has been set."""


class Executor:
    """Advances each execution when its collective has completed, and issues collectives in turn.

    It has no thread and blocks only where it connects a new stage group. All methods must be called
    on one thread.

    Args:
        rank: This rank in the model's process group.
        groups: The stage groups to send through.
        watch: Tells when a collective has completed.
        owner: The scheduler that has the executor.
    """

    def __init__(self, rank: int, groups: StageGroups, watch: Watch, owner: Owner) -> None:
        self.unfinished: list[HookExecution] = []
        """The executions that were run and have neither a result nor an error, in bucket order."""
        self._rank = rank
        self._groups = groups
        self._watch = watch
        self._owner = owner
        self._under_way: dict[HookExecution, StageKey] = {}  # where their collectives are

    @property
    def used(self) -> Collection[StageKey]:
        """The stage groups with a collective under way."""
        return self._under_way.values()

    def run(self, execution: HookExecution) -> None:
        """Run an execution, after those that have been run before."""
        self.unfinished.append(execution)
        self._advance(execution)
        self._issue_in_turn()

    def resume(self) -> None:
        """Continue the executions that wait for an exchange, if it has a result now."""
        for execution in list(self.unfinished):
            awaited = execution.exchange
            if awaited is None or execution.failure is not None:
                continue
            if self._owner.take(execution, awaited):
                self._advance(execution)
        self._issue_in_turn()

    def fail_all(self, error: CommHookError) -> None:
        """Fail what is unfinished. If a collective is under way, its end sets the error."""
        for execution in list(self.unfinished):
            execution.failure = execution.failure or error
            execution.close()
            if execution.work is None:
                self.refuse(execution, execution.failure)

    def refuse(self, execution: HookExecution, error: CommHookError) -> None:
        """Set the error of an execution that has nothing under way."""
        execution.close()
        if execution in self.unfinished:
            self.unfinished.remove(execution)
        execution.fail(error)
        self._owner.drop(execution)

    def fail_without(self, epoch: int) -> list[HookExecution]:
        """Fail because a peer has gone: Note [Messages that never end] in comm/peer_watch.py.

        Nothing fails if that has been noticed, or if all ranks may succeed nevertheless. Close the
        connections of what has failed but is still under way, and return it, for :meth:`give_up`.
        """
        waiting = [each for each in self._under_way if each.failure is None]
        if epoch == self._groups.epoch and waiting and self._owner.needs_all_peers():
            error = RuntimeError("Connection closed by peer in the middle of a message")
            self._owner.fail(self._peer_error(waiting[0], error))
        failed = [each for each in self._under_way if each.failure is not None]
        if failed:
            self._groups.close_connections()
        return failed

    def give_up(self, failed: Iterable[HookExecution]) -> bool:
        """Set the error of those that have not ended since :meth:`fail_without` returned them.

        Return whether there is one.
        """
        given_up = [each for each in failed if each in self._under_way]
        for execution in given_up:
            self._end(execution)
            assert execution.failure is not None
            self.refuse(execution, execution.failure)
        return bool(given_up)

    def fail_because(self, what: str, cause: BaseException) -> None:
        """Fail with an error of this rank that says ``what`` happened because of ``cause``."""
        error = CommHookError(f"[rank {self._rank}] {what}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._owner.fail(error)

    def _complete(self, execution: HookExecution) -> None:
        """Continue ``execution``, whose collective has completed."""
        if execution not in self._under_way:
            return  # it had been given up
        error = execution.end_collective()
        self._end(execution)
        if execution.failure is not None:
            self.refuse(execution, execution.failure)
        elif error is not None:
            self._owner.fail(self._peer_error(execution, error))
        else:
            self._issue_in_turn()  # so that the stage group is in use while the hook computes
            if execution.failure is None:
                self._advance(execution)
                self._issue_in_turn()

    def _advance(self, execution: HookExecution) -> None:
        """Run the coroutine to its next collective or unfinished exchange, or to its end."""
        while True:
            try:
                result = execution.step()
            except CommHookError as error:
                self._owner.fail(error)
                return
            if execution.exchange is None:
                break
            if not self._owner.take(execution, execution.exchange):
                return
        if result is not None:
            self._owner.finish(execution, result)

    def _issue_in_turn(self) -> None:
        """Issue what may be issued now: see Note [Order of collectives] in comm/issue_order.py."""
        for execution in in_turn(list(self.unfinished)):
            collective, execution.pending = execution.pending, None
            assert collective is not None
            if self._owner.may_issue(execution, collective):
                self._issue(execution, collective)
            else:
                self._advance(execution)
            if execution.failure is not None:
                return

    def _issue(self, execution: HookExecution, collective: PendingCollective) -> None:
        stage = execution.count(collective)
        if collective.is_vote:
            stage = 0
        try:
            # No local variable may hold the stage group: abandon() has to drop its last reference.
            execution.work = collective.start(self._groups.open(stage, collective.members))
        except CommHookPeerError as error:
            self._owner.fail(self._peer_error(execution, error.with_traceback(None)))
            return
        except Exception as error:
            self._owner.fail(execution.refuse(error.with_traceback(None)))
            return
        self._under_way[execution] = (self._groups.epoch, collective.members, stage)
        done = functools.partial(self._complete, execution)
        self._watch(execution.work, done, (collective.members, stage))
        execution.count_bytes(collective)

    def _end(self, execution: HookExecution) -> None:
        """Note that nothing of ``execution`` is under way."""
        del self._under_way[execution]
        if execution.failure is not None:
            self._groups.drop_unused(self.used)

    def _peer_error(self, execution: HookExecution, error: Exception) -> CommHookError:
        return execution.peer_error(self._groups.published(), error)
