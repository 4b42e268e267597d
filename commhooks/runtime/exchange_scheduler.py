"""Runs the exchanges of a hook: Note [Exchanges between steps] in comm/exchange.py."""

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from commhooks.comm.exchange import Exchange
from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookError
from commhooks.runtime.execution import ExchangeExecution, HookExecution
from commhooks.runtime.executor import Executor, Owner, Watch


class ExchangeScheduler(Owner):
    """Runs exchanges in the order in which they begin. They have no vote.

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
        self.executor = Executor(rank, groups, watch, self)
        self._groups = groups
        self._on_end = on_end
        self._failure: CommHookError | None = None  # since the last step that failed
        self._when_idle: list[Callable[[], None]] = []

    def begin(self, executions: Sequence[ExchangeExecution]) -> None:
        """Begin the exchanges that a step has handed over, in the order of its buckets."""
        for execution in executions:
            if self._failure is None:
                self.executor.run(execution)
            else:
                self.executor.refuse(execution, self._failure)

    def when_idle(self, function: Callable[[], None]) -> None:
        """Call ``function`` once no exchange is unfinished."""
        self._when_idle.append(function)
        self._tell_idle()

    def fail(self, error: CommHookError) -> None:
        """Fail all exchanges, until a step fails because it awaits one of them."""
        if self._failure is None:
            self._failure = error
            self._groups.publish(str(error))
            self._groups.disconnect(self.executor.used)
        self.executor.fail_all(error)

    def drop_all(self, error: CommHookError) -> None:
        """End all exchanges because of the ``error`` of a step, which fails on all ranks."""
        self.executor.fail_all(error)
        # Those that are still pending must not hold up later ones.
        self.executor.unfinished.clear()
        self._groups.abandon(self.executor.used)
        self._failure = None
        self._tell_idle()

    def take(self, execution: HookExecution, exchange: Exchange) -> bool:  # noqa: ARG002
        """Fail: exchanges end in any order."""
        self.fail(execution.error("an exchange cannot await another exchange"))
        return False

    def finish(self, execution: HookExecution, result: Tensor) -> None:
        """Set the result, and tell who waits for it."""
        self.executor.unfinished.remove(execution)
        execution.future.set_result(result)
        self.drop(execution)

    def drop(self, execution: HookExecution) -> None:
        """Tell who waits for the exchange, which has ended."""
        self._on_end(cast("ExchangeExecution", execution))
        self._tell_idle()

    def _tell_idle(self) -> None:
        while self._when_idle and not self.executor.unfinished:
            self._when_idle.pop()()
