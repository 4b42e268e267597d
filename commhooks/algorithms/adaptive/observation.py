"""Times what a hook does with a bucket: its own work, and its collectives."""

import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, TypeVar, cast

from commhooks.comm.communicator import PendingCollective

__all__ = ["Observation", "Observed", "observe"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Observed:
    """A collective that has completed. Times are those of ``time.monotonic_ns()``."""

    operation: str
    members: tuple[int, ...]
    wire_bytes: int
    issued_ns: int
    completed_ns: int


@dataclass
class Observation:
    """What a run of a hook has done. ``local_ns``: before, between and after ``collectives``.

    Local times are the CPU times of the hook's thread. The elapsed time would say how busy its core
    was, with backward for example, and the timeline adds that. On a GPU, the times are those of the
    host, and say how long launching took.
    """

    clock: Callable[[Observed], float] = lambda _: 0.0
    """Called with each collective, in the order of completion; returns what it took, alone."""
    local_ns: list[int] = field(default_factory=lambda: [0])
    collectives: list[Observed] = field(default_factory=list)
    link_seconds: float = 0.0

    @property
    def local_seconds(self) -> float:
        """The hook's own work."""
        return sum(self.local_ns) * 1e-9

    def complete(self, collective: PendingCollective) -> None:
        """Note that a collective has completed."""
        now, issued = time.monotonic_ns(), collective.issued_ns
        self.local_ns.append(0)
        observed = Observed(
            collective.operation, collective.members, collective.count(), issued, now
        )
        self.collectives.append(observed)
        self.link_seconds += self.clock(observed)


@coroutine
def observe(
    run: Coroutine[Any, Any, _Result], observation: Observation
) -> Generator[Any, Any, _Result]:
    """Await ``run``, and note in ``observation`` what it does."""
    resume, argument = run.send, cast("Any", None)
    while True:
        start = time.thread_time_ns()
        try:
            awaited = resume(argument)
        except StopIteration as stop:
            observation.local_ns[-1] += time.thread_time_ns() - start
            result: _Result = stop.value
            return result
        observation.local_ns[-1] += time.thread_time_ns() - start
        try:
            yield awaited
            resume, argument = run.send, None
        except GeneratorExit:
            run.close()
            raise
        except BaseException as error:
            resume, argument = run.throw, error
            continue
        if isinstance(awaited, PendingCollective) and awaited.issued_ns:
            observation.complete(awaited)
