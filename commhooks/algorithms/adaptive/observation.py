"""Times what a hook does with a bucket: its own work, and its collectives."""

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, TypeVar, cast

from commhooks.algorithms.adaptive.timing import HOST, Moment, Times
from commhooks.comm.communicator import PendingCollective

__all__ = ["Observation", "Observed", "observe"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Observed:
    """A collective that has completed. All times begin at the same moment, whichever that is."""

    operation: str
    members: tuple[int, ...]
    wire_bytes: int
    issued_ns: int
    completed_ns: int


@dataclass
class Observation:
    """What a run of a hook has done. ``local_ns``: before, between and after ``collectives``.

    On a device it is known when ``times`` have settled.
    """

    clock: Callable[[Observed], float] = lambda _: 0.0
    """Called with each collective, in the order of completion; returns what it took, alone."""
    times: Times = HOST
    local_ns: list[int] = field(default_factory=lambda: [0])
    collectives: list[Observed] = field(default_factory=list)
    link_seconds: float = 0.0

    @property
    def local_seconds(self) -> float:
        """The hook's own work."""
        return sum(self.local_ns) * 1e-9

    def work(self, start: Moment, end: Moment) -> None:
        """Note that the hook has worked."""
        stage = len(self.local_ns) - 1

        def note(start_ns: int, end_ns: int) -> None:
            self.local_ns[stage] += end_ns - start_ns

        self.times.when_known((start, end), note)

    def complete(self, collective: PendingCollective, ready: Moment) -> None:
        """Note that a collective has completed. ``ready``: when the hook had done what it sends."""
        nbytes = collective.count()
        issued = collective.issued_ns if isinstance(ready, int) else ready

        def note(issued_ns: int, now_ns: int) -> None:
            observed = Observed(collective.operation, collective.members, nbytes, issued_ns, now_ns)
            self.collectives.append(observed)
            self.link_seconds += self.clock(observed)

        self.local_ns.append(0)
        self.times.when_known((issued, self.times.now()), note)


@coroutine
def observe(
    run: Coroutine[Any, Any, _Result], observation: Observation
) -> Generator[Any, Any, _Result]:
    """Await ``run``, and note in ``observation`` what it does."""
    resume, argument, times = run.send, cast("Any", None), observation.times
    while True:
        start = times.work()
        try:
            awaited = resume(argument)
        except StopIteration as stop:
            observation.work(start, times.work())
            result: _Result = stop.value
            return result
        ready = times.work()
        observation.work(start, ready)
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
            observation.complete(awaited, ready)
