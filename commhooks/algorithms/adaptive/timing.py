"""When things happen: on the host, or on a device that works behind it.

Note [Times of a device]
~~~~~~~~~~~~~~~~~~~~~~~~
The host only launches work for a device, so its clock says nothing about hooks and collectives
there. An event says when the device gets to its place in a stream, but later. So a moment is a
number on the host and an event on a device, and who wants to know the time passes a function to
``when_known``. On the host it is called at once. On a device it is called by ``settle``, in the
order of the calls, so the functions may rely on what earlier ones have noted.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["HOST", "Moment", "StreamTimes", "Times", "times_of"]

Moment: TypeAlias = int | torch.Event
"""Nanoseconds of ``time.monotonic_ns()``, or an event with ``enable_timing``."""

_REBASE_NS = 1_000_000_000
"""Events tell milliseconds in float32: over this time to a tenth of a microsecond."""


class Times(Protocol):
    """Tells moments, and calls functions with their nanoseconds."""

    def now(self) -> Moment:
        """Return the present moment; on a device, that of the current stream."""

    def work(self) -> Moment:
        """Return a moment in the time that the hook's own work takes."""

    def when_known(self, moments: tuple[Moment, ...], use: Callable[..., None]) -> None:
        """Call ``use`` with the nanoseconds of each moment, when they are known."""

    def settle(self, *, wait: bool) -> None:
        """Call the functions whose moments are known; with ``wait``, wait for all."""

    def forget(self) -> None:
        """Do not call the functions that have not been called yet."""

    def cores(self) -> float:
        """Return how many things a rank does at a time."""


class HostTimes:
    """Times of the host.

    The hook's own work is measured in CPU time of its thread. The elapsed time would say how busy
    its core was, with backward for example, and the timeline adds that.
    """

    def now(self) -> Moment:
        return time.monotonic_ns()

    def work(self) -> Moment:
        return time.thread_time_ns()

    def when_known(self, moments: tuple[Moment, ...], use: Callable[..., None]) -> None:
        use(*moments)

    def settle(self, *, wait: bool) -> None:
        pass

    def forget(self) -> None:
        pass

    def cores(self) -> float:
        """Return the cores for each rank of this machine."""
        own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        available = len(own) or os.cpu_count() or 1
        return max(1.0, available / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class StreamTimes:
    """Times of the streams of a device: Note [Times of a device].

    The time of the hook's own work is what passes on its stream, so it contains what backward takes
    from it at the same time. Hence :meth:`cores` leaves backward one of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[tuple[tuple[Moment, ...], Callable[..., None]]] = deque()
        self._origin: Any = None
        self._origin_ns = 1  # so that no moment is 0

    def now(self) -> Moment:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    work = now

    def when_known(self, moments: tuple[Moment, ...], use: Callable[..., None]) -> None:
        self._waiting.append((moments, use))

    def settle(self, *, wait: bool) -> None:
        while self._waiting:
            moments: Any = self._waiting[0][0]
            if wait:
                for moment in moments:
                    moment.synchronize()
            elif not all(moment.query() for moment in moments):
                return
            _, use = self._waiting.popleft()
            use(*map(self._nanoseconds, moments))

    def forget(self) -> None:
        self._waiting.clear()

    def cores(self) -> float:
        return 2.0

    def _nanoseconds(self, moment: Any) -> int:
        if self._origin is None:
            self._origin = moment
        elapsed = int(self._origin.elapsed_time(moment) * 1e6)
        found = self._origin_ns + elapsed
        if elapsed > _REBASE_NS:
            self._origin, self._origin_ns = moment, found
        return found


HOST = HostTimes()


def times_of(device: torch.device) -> Times:
    """Return the times of the hooks on tensors of ``device``."""
    return HOST if device.type == "cpu" else StreamTimes(device)
