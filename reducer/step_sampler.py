"""Sample the times of steps for the logging data."""

from __future__ import annotations

import time

__all__: list[str] = []

_SAMPLED_FIRST = 10


class StepSampler:
    """Samples the times of the first ten steps, then those of every ``rate``-th step.

    ``forward_start``, ``forward_seconds``: of the current step, by :func:`time.monotonic`; set by
    the wrapper.
    """

    def __init__(self) -> None:
        self.forward_start = 0.0
        self.forward_seconds = 0.0
        self._rate = 100
        self._last_step = 0
        self._sampled_step = 0
        self._sums: dict[str, float] = {}
        self._samples = 0
        self._last: dict[str, float] = {}
        self._points: dict[str, float] = {}

    def sample(self, step: int, times: dict[str, float]) -> None:
        """Take the times of a step, unless it is not to be sampled or was taken before.

        ``times``: ``Reducer.last_times()`` after ``step`` steps.
        """
        if step == self._last_step or not times["backward_start"]:
            return
        self._last_step = step
        if step > _SAMPLED_FIRST and step % self._rate:
            return
        self._sampled_step = step
        backward = times["backward_end"] - times["backward_start"]
        start, end = times["communication_start"], times["communication_end"]
        self._last = {
            "forward_compute_time": self.forward_seconds,
            "backward_compute_time": backward,
            "backward_comm_time": end - start if start else 0.0,
            "backward_compute_comm_overlap_time": max(0.0, times["backward_end"] - start)
            if start
            else 0.0,
        }
        self._points = {
            "forward_compute_time_start": self.forward_start,
            "backward_compute_time_start": times["backward_start"],
            "backward_compute_time_end": times["backward_end"],
        }
        if start:
            self._points |= {"backward_comm_time_start": start, "backward_comm_time_end": end}
        self._samples += 1
        for name, seconds in self._last.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds

    def set_rate(self, rate: int) -> None:
        """Sample every ``rate``-th step. Raises ValueError if ``rate`` is less than 1."""
        if rate < 1:
            raise ValueError(
                f"DDP runtime logging sample rate should be equal or greater than 1, found {rate}."
            )
        self._rate = rate

    def data(self) -> dict[str, int]:
        """Return the last sample, and averages over all samples, in nanoseconds as in torch.

        Points in time are of :func:`time.time_ns`; ``iteration`` is the step of the last sample.
        """
        averages = {f"avg_{name}": total / self._samples for name, total in self._sums.items()}
        offset = time.time() - time.monotonic()
        points = {name: offset + point for name, point in self._points.items()}
        seconds = self._last | averages | points
        data = {name: int(value * 1e9) for name, value in seconds.items()}
        return data | {"iteration": self._sampled_step}
