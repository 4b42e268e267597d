"""Notes what happens in each step, and when the same buckets have come twice."""

import functools

from commhooks.algorithms.adaptive.report import Window
from commhooks.algorithms.adaptive.timing import Moment, Times
from reducer import GradBucket

__all__ = ["Watch"]

Buckets = tuple[tuple[tuple[str, ...], int], ...]
"""The names of the parameters and the bytes of each bucket of a step."""


class Watch:
    """The step in progress, and the one before it."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._step = -1
        self._current: list[tuple[tuple[str, ...], int]] = []
        self._previous: Buckets = ()
        self._first_ns = 0
        self._last_launch_ns = 0
        self._end_ns = 0

    def begin_step(self, step: int, launched: Moment, window: Window) -> Buckets | None:
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
        self._times.when_known(
            (launched,), functools.partial(self._note_first, window if is_repeated else None)
        )
        return finished if is_repeated else None

    def _note_first(self, window: Window | None, launched_ns: int) -> None:
        if window is not None and self._first_ns:
            window.steps.append((launched_ns - self._first_ns) * 1e-9)
            window.forwards.append(max(launched_ns - self._end_ns, 0) * 1e-9)
        self._first_ns = self._last_launch_ns = launched_ns

    def bucket(self, bucket: GradBucket, launched: Moment, window: Window) -> None:
        """Note that a bucket has come."""
        launches = window.launches.setdefault(len(self._current), [])
        self._current.append((tuple(bucket.names), bucket.buffer().nbytes))
        self._times.when_known((launched,), functools.partial(self._note_launch, launches))

    def _note_launch(self, launches: list[float], launched_ns: int) -> None:
        launches.append((launched_ns - self._last_launch_ns) * 1e-9)
        self._last_launch_ns = launched_ns

    def end_bucket(self) -> None:
        """Note that the average of a bucket is there, and nothing more is measured on it."""
        self._times.when_known((self._times.now(),), self._note_end)

    def _note_end(self, now_ns: int) -> None:
        self._end_ns = now_ns

    def recover(self) -> None:
        """Do not time the step that has failed."""
        self._first_ns = 0
