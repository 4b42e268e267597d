"""Medians with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Interval", "median_interval"]

_RESAMPLES = 4000
_CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A median, and the ends of its interval of 95 %."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median and its bootstrap interval, the same one for the same values."""
    draw = np.random.default_rng(0)
    samples = draw.choice(np.array(values), (_RESAMPLES, len(values)))
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(np.median(samples, axis=1), [tail, 1 - tail])
    return Interval(float(low), float(np.median(values)), float(high))
