"""Read and write numbers with units, ``1gbit``, ``100 Mbit/s``, ``20us``, and tables of them."""

import math
import re
from collections.abc import Collection, Mapping, Sequence

_LARGE = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# A capital B stands for bytes.
_RATE = re.compile(r"([0-9.e+-]+?)\s*([kKmMgGtT]?)(?:(?i:bit(?:/s|ps)?)|bps|b/s)")
_DURATION = re.compile(r"([0-9.e+-]+?)\s*([mun]?)s", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """Return bits per second. Raises ValueError unless it is a positive number with a unit."""
    rate = _parse(_RATE, text, {prefix.lower(): scale for prefix, scale in _LARGE.items()})
    if not 0 < rate < math.inf:
        raise ValueError(
            f"expected a rate in bits per second, such as 100mbit, 1gbit or 2.5Gbps; found {text!r}"
        )
    return rate


def format_rate(bits_per_second: float) -> str:
    """Format briefly, such as ``2.5 Gbit/s``."""
    return _format(bits_per_second, _LARGE, "bit/s")


def format_bytes(count: float) -> str:
    """Format briefly, such as ``3.34 MB``."""
    return _format(count, _LARGE, "B")


def parse_duration(text: str) -> float:
    """Return seconds. Raises ValueError unless it is a number of at least 0 with a unit."""
    seconds = _parse(_DURATION, text, _SMALL)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"expected a duration, such as 20us, 1.5ms or 2s; found {text!r}")
    return seconds


def format_duration(seconds: float) -> str:
    """Format briefly, such as ``1.5 ms``."""
    return _format(seconds, _SMALL, "s")


def aligned(lines: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Align cells in columns, those in ``left`` to the left; a single cell may be of any width."""
    widths = [
        max(len(line[i]) for line in lines if i < len(line) and len(line) > 1)
        for i in range(len(lines[0]))
    ]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines
    )


def _parse(pattern: re.Pattern[str], text: str, scales: Mapping[str, float]) -> float:
    """Return the number in ``text``, NaN if it is none."""
    match = pattern.fullmatch(text.strip())
    try:
        return float(match[1]) * scales[match[2].lower()] if match else math.nan
    except ValueError:
        return math.nan


def _format(number: float, scales: Mapping[str, float], unit: str) -> str:
    """Return three digits and the largest unit with which the number is at least 1."""
    if not math.isfinite(number):
        return str(number)
    for prefix, scale in scales.items():
        digits = f"{number / scale:.3g}"
        if float(digits) >= 1:
            return f"{digits} {prefix}{unit}"
    return f"{number:.3g} {unit}"
