"""Runs executions side by side on one thread, and issues their collectives in turn."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch._C._distributed_c10d import Work

from commhooks.comm.communicator import PendingCollective
from commhooks.comm.issue_order import in_turn
from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError, CommHookPeerError
from commhooks.runtime.execution import HookExecution

__all__ = ["Executor", "Watch"]

Watch = Callable[[Work, Callable[[], None], int], None]
"""Called with a work, a function and a stage. Must arrange that the function is called on the
executor's thread when the work has completed, with or without an error."""


class Executor(ABC):
    """Advances each execution when its collective has completed, and issues collectives in turn.

    It has no thread and blocks only where it connects a new stage group. All methods must be called
    on one thread.

    Args:
        rank: This rank in the model's process group.
        groups: The stage groups to send through.
        watch: Tells when a collective has completed.
    """

    def __init__(self, rank: int, groups: StageGroups, watch: Watch) -> None:
        self._rank = rank
        self._groups = groups
        self._watch = watch
        self._under_way: list[HookExecution] = []  # with a collective under way
        self._given_up: list[HookExecution] = []  # under way when connections were closed
        self._unfinished: list[HookExecution] = []  # in bucket order

    def _complete(self, execution: HookExecution) -> None:
        """Continue ``execution``, whose collective has completed."""
        if execution not in self._under_way:
            return  # it had been given up
        self._under_way.remove(execution)
        error = execution.end_collective()
        failure = self._failure_of(execution)
        if failure is not None:
            self._set_error(execution, failure)
        elif error is not None:
            self.fail(self._peer_error(execution, error))
        else:
            self._issue_in_turn()  # so that the stage group is in use while the hook computes
            if self._failure_of(execution) is None:
                self._advance(execution)
                self._issue_in_turn()

    def fail_without(self, epoch: int) -> None:
        """Fail because a peer has gone: Note [Messages that never end] in comm/peer_watch.py.

        Nothing happens if that has been noticed, or if all ranks may succeed nevertheless.
        """
        if epoch != self._groups.epoch or not self._needs_all_peers() or not self._under_way:
            return
        self._given_up = list(self._under_way)
        error = RuntimeError("Connection closed by peer in the middle of a message")
        failure = self._peer_error(self._under_way[0], error)
        self._groups.close_connections()
        self.fail(failure)

    def give_up(self) -> bool:
        """Set the error where a message has not ended since :meth:`fail_without`.

        Return whether there is one.
        """
        given_up = [each for each in self._given_up if each in self._under_way]
        for execution in given_up:
            self._under_way.remove(execution)
            failure = self._failure_of(execution)
            assert failure is not None
            self._set_error(execution, failure)
        self._given_up.clear()
        return bool(given_up)

    @abstractmethod
    def _needs_all_peers(self) -> bool:
        """Return whether pending collectives fail on all ranks if a peer has gone."""

    @abstractmethod
    def fail(self, error: CommHookError) -> None:
        """Fail what is unfinished, on all ranks."""

    def error(self, what: str, cause: BaseException) -> CommHookError:
        """Return an error of this rank that says ``what`` happened because of ``cause``."""
        error = CommHookError(f"[rank {self._rank}] {what}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    @abstractmethod
    def _failure_of(self, execution: HookExecution) -> CommHookError | None:
        """Return why ``execution`` must end, if it must."""

    @abstractmethod
    def _advance(self, execution: HookExecution) -> None:
        """Run the coroutine to its next await or to its end."""

    def _run(self, execution: HookExecution) -> None:
        """Run an execution, after those that have been run before."""
        self._unfinished.append(execution)
        self._advance(execution)
        self._issue_in_turn()

    def _issue_in_turn(self) -> None:
        """Issue what may be issued now: see Note [Order of collectives] in comm/issue_order.py."""
        for execution in in_turn(list(self._unfinished)):
            collective, execution.pending = execution.pending, None
            assert collective is not None
            self._issue(execution, collective)
            if self._failure_of(execution) is not None:
                return

    def _issue(self, execution: HookExecution, collective: PendingCollective) -> None:
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
        self._under_way.append(execution)
        self._watch(execution.work, functools.partial(self._complete, execution), stage)
        execution.count_bytes(collective)

    def _end_all(self, error: CommHookError) -> None:
        """Set ``error`` where nothing is under way; :meth:`_complete` does so for the others."""
        for execution in list(self._unfinished):
            execution.close()
            if execution.work is None:
                self._set_error(execution, error)

    def _set_error(self, execution: HookExecution, error: CommHookError) -> None:
        if execution in self._unfinished:
            self._unfinished.remove(execution)
        execution.fail(error)

    def _peer_error(self, execution: HookExecution, error: Exception) -> CommHookError:
        return execution.peer_error(self._groups.published(), error)
