"""Durations in text: ``20us``, ``1.5 ms``. Numbers are seconds."""

import math
import re

__all__ = ["format_duration", "parse_duration"]

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"([0-9.e+-]+?)\s*(s|ms|us|ns)", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Seconds. Raises ValueError for anything but a number, 0 or more, and a unit of time."""
    match = _DURATION.fullmatch(text.strip())
    try:
        seconds = float(match[1]) * _UNITS[match[2].lower()] if match else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"expected a duration, such as 20us, 1.5ms or 2s; found {text!r}")
    return seconds


def format_duration(seconds: float) -> str:
    """Short, for people: ``1.5 ms``."""
    for unit, length in _UNITS.items():
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:g} s"
