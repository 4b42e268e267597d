"""The state of the step that a runner is in."""

from enum import Enum, auto

from commhooks.errors import CommHookError

__all__ = ["Phase", "StepState"]


class Phase(Enum):
    """Where a step stands on this rank; see :class:`StepState`."""

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
