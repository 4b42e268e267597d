"""When things happen, on the host or on a device that works behind it, and what hooks do.

Note [Times of a device]
~~~~~~~~~~~~~~~~~~~~~~~~
The host only launches work for a device, so its clock says nothing about hooks there. An event says
when the device gets to its place in a stream, but later. So a moment is a number on the host and an
event on a device, and the seconds between two moments are asked for in a later step. The host waits
for the device only if it is so far ahead.
"""

import os
import time
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, TypeAlias, TypeVar

import torch

from commhooks.comm.communicator import PendingCollective

Moment: TypeAlias = int | torch.Event
"""Nanoseconds, or an event with ``enable_timing``."""
_Result = TypeVar("_Result")


class Clock:
    """The clock of the host.

    The hook's own work is measured in CPU time of its thread. The elapsed time would say how busy
    its core was, with backward for example, and the timeline adds that.
    """

    def now(self) -> Moment:
        """Return the present moment; on a device, that of the current stream."""
        return time.monotonic_ns()

    def work(self) -> Moment:
        """Return a moment in the time that the hook's own work takes."""
        return time.thread_time_ns()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments. Waits for a device."""
        return float(end - start) * 1e-9

    def cores(self) -> float:
        """Return how many things a rank does at a time: the cores for each rank of this machine."""
        available = len(os.sched_getaffinity(0))
        return max(1.0, available / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class DeviceClock(Clock):
    """The clock of the streams of a device: Note [Times of a device].

    The time of the hook's own work is what passes on its stream, so it contains what backward takes
    from it at the same time. Hence :meth:`cores` leaves backward one of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    work = now

    def seconds(self, start: Any, end: Any) -> float:
        for event in (start, end):
            event.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def cores(self) -> float:
        return 2.0


HOST = Clock()


def clock_of(device: torch.device) -> Clock:
    """Return the clock of the hooks on tensors of ``device``."""
    return HOST if device.type == "cpu" else DeviceClock(device)


@dataclass
class HookTiming:
    """Time a hook spends on its own work, around each collective."""

    clock: Clock = HOST
    collectives: list[tuple[str, int]] = field(default_factory=list)
    """The operation and the bytes on the wire of each."""
    work: list[list[tuple[Moment, Moment]]] = field(default_factory=lambda: [[]])
    """Beginnings and ends of work; a list more than collectives."""

    @property
    def local_seconds(self) -> tuple[float, ...]:
        """The seconds of the hook's own work, one more than collectives. Waits for a device."""
        return tuple(sum(self.clock.seconds(*pair) for pair in between) for between in self.work)

    @coroutine
    def observe(self, hook: Coroutine[Any, Any, _Result]) -> Generator[Any, Any, _Result]:
        """Await ``hook``, and note what it does."""
        while True:
            start = self.clock.work()
            try:
                awaited = hook.send(None)
            except StopIteration as stop:
                result: _Result = stop.value
                return result
            finally:
                self.work[-1].append((start, self.clock.work()))
            try:
                yield awaited
            except BaseException:
                hook.close()
                raise
            if isinstance(awaited, PendingCollective) and awaited.issued_ns:
                self.collectives.append((awaited.operation, awaited.count()))
                self.work.append([])
