"""Runs the exchanges of a hook: Note [Exchanges between steps] in comm/exchange.py."""

from collections.abc import Callable, Sequence
from typing import cast

from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError
from commhooks.runtime.execution import ExchangeExecution, HookExecution
from commhooks.runtime.executor import Executor, Watch

__all__ = ["ExchangeScheduler"]


class ExchangeScheduler(Executor):
    """Runs exchanges in the order in which they begin.

    Args:
        rank, groups, watch: See :class:`Executor`.
        on_end: Called with each exchange that has ended, after its future has been set.
    """

    def __init__(
        self,
        rank: int,
        groups: StageGroups,
        watch: Watch,
        on_end: Callable[[ExchangeExecution], None],
    ) -> None:
        super().__init__(rank, groups, watch)
        self._on_end = on_end
        self._failure: CommHookError | None = None  # since the last step that failed
        self._when_idle: list[Callable[[], None]] = []

    def begin(self, executions: Sequence[ExchangeExecution]) -> None:
        """Begin the exchanges that a step has handed over, in the order of its buckets."""
        for execution in executions:
            execution.failure = self._failure
            if self._failure is None:
                self._run(execution)
            else:
                self._unfinished.append(execution)
                self._set_error(execution, self._failure)

    def when_idle(self, function: Callable[[], None]) -> None:
        """Call ``function`` once no exchange is unfinished."""
        self._when_idle.append(function)
        self._tell_idle()

    def fail(self, error: CommHookError) -> None:
        """Fail all exchanges, until a step fails because it awaits one of them."""
        if self._failure is None:
            self._failure = error
            self._groups.publish(str(error))
            self._groups.disconnect()
        self._end_all(error)

    def drop(self, error: CommHookError) -> None:
        """End all exchanges because of the ``error`` of a step, which fails on all ranks."""
        self._end_all(error)
        self._unfinished.clear()  # those that are still pending must not hold up later ones
        self._groups.abandon()
        self._failure = None
        self._tell_idle()

    def _needs_all_peers(self) -> bool:
        return True

    def _end_all(self, error: CommHookError) -> None:
        for execution in self._unfinished:
            exchange = cast("ExchangeExecution", execution)
            exchange.failure = exchange.failure or error
        super()._end_all(error)

    def _failure_of(self, execution: HookExecution) -> CommHookError | None:
        return cast("ExchangeExecution", execution).failure

    def _advance(self, execution: HookExecution) -> None:
        try:
            result = execution.step()
        except CommHookError as error:
            self.fail(error)
            return
        if execution.exchange is not None:
            self.fail(execution.error("an exchange cannot await another exchange"))
        elif result is not None:
            self._unfinished.remove(execution)
            execution.future.set_result(result)
            self._end_one(execution)

    def _set_error(self, execution: HookExecution, error: CommHookError) -> None:
        execution.close()
        super()._set_error(execution, error)
        self._end_one(execution)

    def _end_one(self, execution: HookExecution) -> None:
        self._on_end(cast("ExchangeExecution", execution))
        self._tell_idle()

    def _tell_idle(self) -> None:
        while self._when_idle and not self._unfinished:
            self._when_idle.pop()()
