"""Read and write rates and durations: ``1gbit``, ``100 Mbit/s``, ``20us``, ``1.5 ms``."""

import math
import re

_BITS_PER_SECOND = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# A capital B stands for bytes.
_RATE = re.compile(r"([0-9.e+-]+?)\s*([kKmMgGtT]?)(?:(?i:bit(?:/s|ps)?)|bps|b/s)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"([0-9.e+-]+?)\s*(s|ms|us|ns)", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """Return bits per second. Raises ValueError unless it is a positive number with a unit."""
    match = _RATE.fullmatch(text.strip())
    try:
        rate = float(match[1]) * _BITS_PER_SECOND[match[2].lower()] if match else math.nan
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ValueError(
            f"expected a rate in bits per second, such as 100mbit, 1gbit or 2.5Gbps; found {text!r}"
        )
    return rate


def format_rate(bits_per_second: float) -> str:
    """Format briefly, such as ``2.5 Gbit/s``."""
    if not math.isfinite(bits_per_second):
        return str(bits_per_second)
    for unit in ("T", "G", "M", "k"):
        number = f"{bits_per_second / _BITS_PER_SECOND[unit.lower()]:.3g}"
        if float(number) >= 1:
            return f"{number} {unit}bit/s"
    return f"{bits_per_second:.3g} bit/s"


def parse_duration(text: str) -> float:
    """Return seconds. Raises ValueError unless it is a number of at least 0 with a unit."""
    match = _DURATION.fullmatch(text.strip())
    try:
        seconds = float(match[1]) * _SECONDS[match[2].lower()] if match else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"expected a duration, such as 20us, 1.5ms or 2s; found {text!r}")
    return seconds


def format_duration(seconds: float) -> str:
    """Format briefly, such as ``1.5 ms``."""
    for unit, length in _SECONDS.items():
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:g} s"
