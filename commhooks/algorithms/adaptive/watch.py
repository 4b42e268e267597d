"""Notes what happens in each step, and when the same buckets have come twice."""

import time

from commhooks.algorithms.adaptive.report import Window
from reducer import GradBucket

__all__ = ["Watch"]

Buckets = tuple[tuple[tuple[str, ...], int], ...]
"""The names of the parameters and the bytes of each bucket of a step."""


class Watch:
    """The step in progress, and the one before it."""

    def __init__(self) -> None:
        self._step = -1
        self._current: list[tuple[tuple[str, ...], int]] = []
        self._previous: Buckets = ()
        self._first_ns = 0
        self._last_launch_ns = 0
        self._end_ns = 0

    def begin_step(self, step: int, launched_ns: int, window: Window) -> Buckets | None:
        """Begin a step. Return the buckets of the one before if they came twice in a row.

        A step that has failed begins again under the same number, and is forgotten: some ranks have
        seen more of it than others.
        """
        is_again, self._step = step == self._step, step
        finished, self._current = tuple(self._current), []
        if is_again:
            finished = ()
        is_repeated = bool(finished) and finished == self._previous
        if finished:
            self._previous = finished
        if is_repeated and self._first_ns:
            window.steps.append((launched_ns - self._first_ns) * 1e-9)
            window.forwards.append(max(launched_ns - self._end_ns, 0) * 1e-9)
        self._first_ns = self._last_launch_ns = launched_ns
        return finished if is_repeated else None

    def bucket(self, bucket: GradBucket, launched_ns: int, window: Window) -> None:
        """Note that a bucket has come."""
        self._current.append((tuple(bucket.names), bucket.buffer().nbytes))
        seconds = (launched_ns - self._last_launch_ns) * 1e-9
        window.launches.setdefault(len(self._current) - 1, []).append(seconds)
        self._last_launch_ns = launched_ns

    def end_bucket(self) -> None:
        """Note that the average of a bucket is there."""
        self._end_ns = time.monotonic_ns()

    def recover(self) -> None:
        """Do not time the step that has failed."""
        self._first_ns = 0
