"""Decides which estimates of the link count, and when the link is probed.

::

    after the first trials  ranks probe: after backward they average zeros, in a long row
    a probe, if long        counts
    other collectives       count while no probe has, if their row is long. Afterwards: if they
                            differ from the first such estimate, something has changed, and ranks
                            probe again

So a plan with small messages does not take the speed of buffers for the rate of the link; see
Note [Bytes in a row] in link.py. Nor does one whose messages wait for a core that backward holds.
All ranks have the same estimates, so they decide the same.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from commhooks.algorithms.adaptive.fit import Cost, Point
from commhooks.algorithms.adaptive.link import Estimate, row_class
from commhooks.algorithms.adaptive.report import Agreed

__all__ = ["PROBE_MESSAGES", "LinkWatch"]

PROBE_MESSAGES = 3
"""Of half a long row each, so that the last one ends a long row."""
_LONG_BYTES = 1 << 21
_LONG_SECONDS = 20e-3
"""A long row has at least these bytes and this many seconds of sending. The links of
our tests and benchmarks let 256 kB pass, or what they send in 1 ms. In shorter rows, threads that
wake up late count too much: 5 ms of 10 Gbit/s showed 1.5 to 8.5."""
_OTHER_TIME = 0.2
_KEPT = 5
"""Reports whose latencies count, and probes whose CPU time does: the least of them. Of few small
messages, some are late; and the process may do other work beside a probe."""


class LinkWatch:
    """The estimate that counts, and what has been seen since."""

    def __init__(self) -> None:
        self.wants_probe = False
        self._counting: Estimate | None = None
        self._is_probed = False
        """Whether that is from a probe."""
        self._step = 0
        """When it was measured."""
        self._longest = 0
        """The class of the longest row so far."""
        self._first: Estimate | None = None
        """The first one from other collectives since then, or since the last change."""
        self._latest: Estimate | None = None
        """The latest one, from any row."""
        self._rounds: deque[float] = deque(maxlen=_KEPT)
        self._byte_cpu_seconds: deque[float] = deque(maxlen=_KEPT)

    @property
    def cost(self) -> Cost | None:
        """What counts."""
        return self._counting and self._counting.cost(min(self._rounds, default=0.0))

    @property
    def byte_cpu_seconds(self) -> float:
        """The time of a core that a byte takes; 0 if no probe has measured it."""
        return min(self._byte_cpu_seconds, default=0.0)

    def take(self, agreed: Agreed, step: int, *, most_steps: int) -> None:
        """Take what was measured until ``step``. Ask for a probe after ``most_steps`` without."""
        new, probe = agreed.link, agreed.probe
        self._latest = new or probe or self._latest
        if agreed.byte_cpu_seconds >= 0:
            self._byte_cpu_seconds.append(agreed.byte_cpu_seconds)
        if new is not None and new.round_seconds >= 0:
            self._rounds.append(new.round_seconds)
        self._longest = max([self._longest, *(each.row_class for each in (new, probe) if each)])
        if probe is not None and self._is_long(probe):
            self._use(probe, step)
            self._is_probed = True
        elif new is not None and not self._is_probed and self._is_long(new):
            self._use(new, step)
        elif new is not None:
            self._first = self._first or new
            if _differ(new, self._first):
                self._first, self.wants_probe = new, True
        self.wants_probe |= self._counting is not None and step - self._step >= most_steps

    def _use(self, estimate: Estimate, step: int) -> None:
        self._counting, self._step = estimate, step
        self._first, self.wants_probe = None, False

    def _is_long(self, estimate: Estimate) -> bool:
        return estimate.row_class >= self._long_class(estimate)

    def expect_others(self) -> None:
        """Do not compare the next messages with those before, which another plan has sent."""
        self._first = None

    def probe_bytes(self) -> float:
        """Return the bytes of each message of a probe; 0 if nothing is known of the link.

        By the latest estimate: on a link that has become slow, a probe for the former rate would
        take too long.
        """
        latest = self._latest or self._counting
        return 2.0 ** self._long_class(latest) / 2 if latest else 0.0

    def probe_seconds(self) -> float:
        """Return what a probe takes, by the latest estimate."""
        if self._latest is None:
            return 0.0
        return PROBE_MESSAGES * self._latest.cost(0.0).seconds(1.0, self.probe_bytes())

    def _long_class(self, estimate: Estimate) -> int:
        """The class of a row that is long enough at this rate: no longer than the longest."""
        rate = 1 / max(estimate.cost(0.0).per_byte, 1e-15)
        return min(self._longest, row_class(max(_LONG_BYTES, _LONG_SECONDS * rate)))

    def to_json(self) -> dict[str, Any] | None:
        """Return the estimate that counts, in JSON's types."""
        if self._counting is None:
            return None
        return {
            "round_seconds": min(self._rounds, default=0.0),
            "byte_cpu_seconds": self.byte_cpu_seconds,
            "is_probed": self._is_probed,
            "longest": self._longest,
            "last": [*self._counting.last],
        }

    def load(self, data: Mapping[str, Any] | None) -> None:
        """Take over what :meth:`to_json` returned, until a probe has shown the link of now."""
        if data is None:
            return
        self._rounds.append(float(data["round_seconds"]))
        self._byte_cpu_seconds.append(float(data["byte_cpu_seconds"]))
        self._is_probed = bool(data["is_probed"])
        self._longest = int(data["longest"])
        self._counting = Estimate(self._rounds[0], self._longest, Point(*data["last"]))
        self.wants_probe = True


def _differ(a: Estimate, b: Estimate) -> bool:
    """Return whether the same message takes another time."""
    now, before = a.last.seconds, b.cost(0.0).per_byte * a.last.bytes
    return abs(now - before) > _OTHER_TIME * before
