"""Simulated time, and resources that are shared: cores and links.

This is a fluid model: at every moment each user of a resource gets an equal share of its capacity.
An event is the moment at which some use ends, so the number of events does not depend on amounts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Clock", "Resource"]


@dataclass(eq=False)
class Resource:
    """``capacity`` units per second, shared equally; one user gets at most ``limit``.

    When the shares are smaller than ``limit``, users get in each other's way and only the fraction
    ``crowded`` of the capacity is used. ``burst`` units are granted at once if they were saved up
    while the resource was idle.
    """

    capacity: float = math.inf
    limit: float = math.inf
    burst: float = 0.0
    crowded: float = 1.0

    def __post_init__(self) -> None:
        self.users = 0
        self._saved = self.burst
        self._idle_since = 0.0

    def speed(self) -> float:
        """Return the units per second that each user gets."""
        share = self.capacity / max(1, self.users)
        return self.limit if share >= self.limit else share * self.crowded

    def enter(self, now: float, amount: float) -> float:
        """Add a user that needs ``amount`` units; return what a burst leaves of them."""
        if self.users == 0 and self.burst:
            idle = (now - self._idle_since) * self.capacity
            self._saved = min(self.burst, self._saved + idle)
        at_once = min(amount, self._saved)
        self._saved -= at_once
        self.users += 1
        return amount - at_once

    def leave(self, now: float) -> None:
        """Remove a user."""
        self.users -= 1
        if self.users == 0:
            self._idle_since = now


@dataclass(eq=False)
class _Use:
    resource: Resource
    remaining: float
    then: Callable[[], None]


class Clock:
    """Advances from event to event until no use is left, and calls back when a use ends."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._uses: list[_Use] = []
        self._delay = Resource(limit=1.0)

    def use(self, resource: Resource, amount: float, then: Callable[[], None]) -> None:
        """Call ``then`` when ``amount`` units of ``resource`` have been used."""
        remaining = resource.enter(self.now, amount)
        self._uses.append(_Use(resource, remaining, then))

    def wait(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` after ``seconds``, independently of all resources."""
        self.use(self._delay, seconds, then)

    def run(self) -> float:
        """Run until no use is left, and return the time of the last event."""
        while self._uses:
            self.events += 1
            pending = [use.remaining / use.resource.speed() for use in self._uses]
            elapsed = min(pending)
            for use in self._uses:
                use.remaining -= elapsed * use.resource.speed()
            done = [
                use for use, seconds in zip(self._uses, pending, strict=True) if seconds <= elapsed
            ]
            self.now += elapsed
            self._uses = [use for use in self._uses if use not in done]
            for use in done:
                use.resource.leave(self.now)
            for use in done:
                use.then()
        return self.now
