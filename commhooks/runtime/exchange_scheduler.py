"""Runs the exchanges of a hook: Note [Exchanges between steps] in comm/exchange.py."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from commhooks.errors import CommHookError
from commhooks.runtime.execution import ExchangeExecution, HookExecution
from commhooks.runtime.scheduler import Scheduler


class ExchangeScheduler(Scheduler):
    """Runs exchanges in the order in which they begin. They have no vote."""

    on_end: Callable[[HookExecution], None] | None = None
    """Called with each exchange that has ended, after its future has been set; None once closed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_idle = threading.Event()
        """Set while no exchange is unfinished. Other threads may wait for it."""
        self.is_idle.set()
        self._failure: CommHookError | None = None  # since the last step that failed

    def begin(self, executions: Sequence[ExchangeExecution]) -> None:
        """Begin the exchanges that a step has handed over, in the order of its buckets."""
        for execution in executions:
            if self._failure is None:
                self._run(execution)
            else:
                self._abort(execution, self._failure)
        if self.unfinished:
            self.is_idle.clear()

    def abort(self, error: CommHookError) -> None:
        """Abort all exchanges, until a step fails because it awaits one of them."""
        if self._failure is None:
            self._failure = error
            self.groups.publish(str(error))
            self.groups.disconnect(self._under_way.values())
        self._abort_unfinished(error)

    def abort_for_step(self, error: CommHookError) -> None:
        """Abort all exchanges because of the ``error`` of a step, which fails on all ranks."""
        self._abort_unfinished(error)
        # Those that are still pending must not hold up later ones.
        self.unfinished.clear()
        self.is_idle.set()
        self.groups.abort(self._under_way.values())
        self._failure = None

    def close(self) -> None:
        super().close()
        self.on_end = None  # which refers to the other scheduler, and that one to this

    def _finish(self, execution: HookExecution, result: Tensor) -> None:
        self.unfinished.remove(execution)
        execution.future.set_result(result)
        self._tell_end(execution)

    def _abort(self, execution: HookExecution, error: CommHookError) -> None:
        super()._abort(execution, error)
        self._tell_end(execution)

    def _tell_end(self, execution: HookExecution) -> None:
        if self.on_end is not None:
            self.on_end(execution)
        if not self.unfinished:
            self.is_idle.set()
