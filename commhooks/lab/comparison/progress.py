"""How much of a comparison is done, and how long the rest will take."""

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from commhooks.lab.comparison.plan import Task

__all__ = ["Progress", "ProgressCallback"]

ProgressCallback = Callable[[str, float, float], None]
"""Called with a description of the current work, the seconds so far, and the estimated seconds of
the whole; 0 if nothing is known yet."""


class Progress:
    """Estimates the time of the tasks to come from those that are done.

    Args:
        callback: is called before each task.
        plan: all tasks, by the names of settings in their order.
        rates: the rates of settings over links, in bits per second.
    """

    def __init__(
        self,
        callback: ProgressCallback,
        plan: Mapping[str, Iterable[Task]],
        rates: Mapping[str, float],
    ) -> None:
        self._callback = callback
        self._left = [(setting, task) for setting, tasks in plan.items() for task in tasks]
        self._rates = rates
        self._start = time.monotonic()
        self._step_seconds: dict[tuple[str, str], float] = {}
        self._wire_bytes: dict[str, float] = {}

    def tell(self, setting: str, what: str) -> None:
        """Tell what is done now."""
        done = time.monotonic() - self._start
        left = self.seconds_left()
        self._callback(f"{setting}: {what}", done, 0.0 if left is None else done + left)

    def end(self, setting: str, task: Task, seconds: float, wire_bytes: float | None) -> None:
        """Note what a task took, and the bytes of a step if they are known."""
        self._left.remove((setting, task))
        self._step_seconds[setting, task.entry.name] = seconds / task.all_steps
        if wire_bytes is not None:
            self._wire_bytes[task.entry.name] = wire_bytes

    def drop(self, name: str) -> None:
        """Forget a setting or an entry that cannot be measured."""
        self._left = [left for left in self._left if name not in (left[0], left[1].entry.name)]

    def seconds_left(self) -> float | None:
        """Return the estimate for all tasks that are not done, None before the first is."""
        if not self._step_seconds:
            return None
        return sum(
            task.all_steps * self._guess(setting, task.entry.name) for setting, task in self._left
        )

    def _guess(self, setting: str, entry: str) -> float:
        """Return the seconds of a step: as measured, or as elsewhere plus the time on the link."""
        if (setting, entry) in self._step_seconds:
            return self._step_seconds[setting, entry]
        elsewhere = [seconds for (_, name), seconds in self._step_seconds.items() if name == entry]
        on_link = 8 * self._wire_bytes.get(entry, 0.0) / self._rates.get(setting, float("inf"))
        return fmean(elsewhere or self._step_seconds.values()) + on_link
