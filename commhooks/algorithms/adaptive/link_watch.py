"""Decides which estimates of the link count, and when the link is probed.

::

    from a long row         counts, whatever it is
    from a shorter row      does not count; if it differs from the first such estimate, something
                            has changed, and ranks probe: they average zeros, in a long row

So a plan with small messages does not take the speed of buffers for the rate of the link. See
Note [Bytes in a row] in link.py. All ranks have the same estimates, so they decide the same.

Probes also measure the time of cores that messages take. So there is one after the first trials,
when nothing is known of the link.
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
_LONG_SECONDS = 5e-3
"""A long row has at least so many bytes, and what the link sends in so many seconds. The links of
our tests and benchmarks let 256 kB pass, or what they send in 1 ms."""
_OTHER_TIME = 0.2
_KEPT = 5
"""Reports whose latencies count, and probes whose time of cores does: the least of them. Of few
small messages, some are late; and the process may do other work beside a probe."""


class LinkWatch:
    """The estimate that counts, and what has been seen since."""

    def __init__(self) -> None:
        self.wants_probe = False
        self._counting: Estimate | None = None
        self._step = 0
        """When it was measured."""
        self._first: Estimate | None = None
        """The first one from a shorter row since then, or since the last change."""
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
        former, new = self._counting, agreed.link
        if agreed.byte_cpu_seconds >= 0:
            self._byte_cpu_seconds.append(agreed.byte_cpu_seconds)
        self._latest = new or self._latest
        if new is not None and new.round_seconds >= 0:
            self._rounds.append(new.round_seconds)
        if new is not None and (former is None or new.row_class >= self._long_class):
            longest = max(new.row_class, former.row_class if former else 0)
            self._counting, self._step = new._replace(row_class=longest), step
            self._first, self.wants_probe = None, False
        elif new is not None:
            self._first = self._first or new
            if _differ(new, self._first):
                self._first, self.wants_probe = new, True
        self.wants_probe |= former is not None and step - self._step >= most_steps

    def expect_others(self) -> None:
        """Do not compare the next messages with those before, which another plan has sent."""
        self._first = None

    def probe_bytes(self) -> float:
        """Return the bytes of each message of a probe; 0 if nothing is known of the link."""
        return 2.0**self._long_class / 2 if self._counting else 0.0

    def probe_seconds(self) -> float:
        """Return what a probe takes, by the latest estimate."""
        if self._latest is None:
            return 0.0
        return PROBE_MESSAGES * self._latest.cost(0.0).seconds(1.0, self.probe_bytes())

    @property
    def _long_class(self) -> int:
        """The class of a row that is long enough: no longer than those of exact averages."""
        assert self._counting is not None
        rate = 1 / max(self._counting.cost(0.0).per_byte, 1e-15)
        return min(self._counting.row_class, row_class(max(_LONG_BYTES, _LONG_SECONDS * rate)))

    def to_json(self) -> dict[str, Any] | None:
        """Return the estimate that counts, in JSON's types."""
        if self._counting is None:
            return None
        return {
            "round_seconds": min(self._rounds, default=0.0),
            "row_class": self._counting.row_class,
            "last": [*self._counting.last],
            "byte_cpu_seconds": self.byte_cpu_seconds,
        }

    def load(self, data: Mapping[str, Any] | None) -> None:
        """Take over what :meth:`to_json` returned, until a probe has shown the link of now."""
        if data is None:
            return
        self._rounds.append(float(data["round_seconds"]))
        self._byte_cpu_seconds.append(float(data["byte_cpu_seconds"]))
        row = int(data["row_class"])
        self._counting = Estimate(self._rounds[0], row, Point(*data["last"]))
        self.wants_probe = True


def _differ(a: Estimate, b: Estimate) -> bool:
    """Return whether the same message takes another time."""
    now, before = a.last.seconds, b.cost(0.0).per_byte * a.last.bytes
    return abs(now - before) > _OTHER_TIME * before
