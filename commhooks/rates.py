"""Rates of links in text: ``1gbit``, ``100 Mbit/s``. Numbers are bits per second."""

import math
import re

__all__ = ["format_rate", "parse_rate"]

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"([0-9.e+-]+?)\s*([kmgt]?)bit(?:/s)?", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """Bits per second. Raises ValueError for anything but a positive number and a unit of bits."""
    match = _RATE.fullmatch(text.strip())
    try:
        rate = float(match[1]) * _UNITS[match[2].lower()] if match else math.nan
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ValueError(
            f"expected a rate in bits per second, such as 100mbit, 1gbit or 2.5gbit; found {text!r}"
        )
    return rate


def format_rate(bits_per_second: float) -> str:
    """Short, for people: ``2.5 Gbit/s``."""
    if not math.isfinite(bits_per_second):
        return str(bits_per_second)
    for unit in ("T", "G", "M", "k"):
        number = f"{bits_per_second / _UNITS[unit.lower()]:.3g}"
        if float(number) >= 1:
            return f"{number} {unit}bit/s"
    return f"{bits_per_second:.3g} bit/s"
