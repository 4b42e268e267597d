"""The columns of a comparison's tables, and how figures are written in them."""

import math
from collections.abc import Callable, Sequence

from commhooks.lab.comparison.rows import HostPair, Row
from commhooks.lab.units import format_duration, format_rate
from commhooks.lab.verdict import fidelity_text

__all__ = [
    "Columns",
    "aligned",
    "costs_columns",
    "explanations",
    "format_bytes",
    "pair_cells",
    "times_columns",
]

Columns = dict[str, Callable[[Row], str]]
"""What cells contain, by the name of the column."""

_EXPLANATIONS = {
    "step": "forward and backward on the slowest rank; median ± distance between the quartiles.",
    "of torch": "the step divided by that of torch DDP.",
    "exposed": "the time that averaging adds to a step of the bare model.",
    "loss": "validation loss after training here.",
    "wire": "bytes that one rank sends per step.",
    "ratio": "bytes of plain averaging divided by those of the hook.",
    "error": "relative error of one step's gradients against the exact mean.",
    "fidelity": "largest change of the validation loss in small trainings, at default options.",
    "memory": "peak, besides the parameters.",
    "break-even": "the hook is faster than torch DDP on links below this rate.",
    "rate": "of the slower direction, one pair at a time.",
    "latency": "of a message of 1 byte in one direction.",
    "slow": "less than half of the rate of the fastest pair.",
}


def times_columns(rows: Sequence[Row], spread: Callable[[Row], float | None]) -> Columns:
    """Return the columns of times. ``spread``: the noise of a row's ``exposed_seconds``."""
    columns: Columns = {
        "step": lambda row: _milliseconds(row.step_seconds, row.step_spread_seconds),
        "of torch": lambda row: f"{row.to_torch:.2f}" if _has_wrapper(row) else "",
        "exposed": lambda row: (
            _milliseconds(row.exposed_seconds, spread(row)) if _has_wrapper(row) else ""
        ),
    }
    if any(row.training for row in rows):
        columns["loss"] = lambda row: (
            "" if row.validation_loss is None else f"{row.validation_loss:.4g}"
        )
    return columns


def costs_columns(rows: Sequence[Row]) -> Columns:
    """Return the columns of what does not depend on the link."""
    columns: Columns = {
        "wire": lambda row: format_bytes(row.wire_bytes) if row.wire_bytes else "",
        "ratio": lambda row: "" if row.ratio is None else f"{row.ratio:.1f}x",
        "error": lambda row: "" if row.error is None else f"{row.error:.1e}",
        "fidelity": lambda row: fidelity_text(row.hook),
        "memory": lambda row: format_bytes(row.peak_bytes),
        "break-even": _break_even,
    }
    return {name: cell for name, cell in columns.items() if any(map(cell, rows))}


def explanations(names: Sequence[str]) -> list[str]:
    """Return a line for each column, which begins with its name."""
    return [f"{name}: {text}" for name, text in _EXPLANATIONS.items() if name in names]


def pair_cells(
    pairs: Sequence[HostPair], slow: Sequence[HostPair]
) -> list[tuple[str, str, str, str]]:
    """Return names, rate, latency and "slow" or nothing, for each pair, the slowest first."""
    return [
        (
            f"{pair.first} - {pair.second}",
            format_rate(pair.bits_per_second),
            format_duration(pair.latency_seconds),
            "slow" if pair in slow else "",
        )
        for pair in sorted(pairs, key=lambda pair: pair.bits_per_second)
    ]


def format_bytes(count: float | None) -> str:
    """Format with a decimal unit: 3337216 -> '3.34 MB'."""
    if count is None:
        return ""
    units = ["B", "kB", "MB", "GB", "TB"]
    while float(f"{count:.3g}") >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, the first column left-aligned; lines may lack cells."""
    widths = [max(len(line[i]) for line in table if i < len(line)) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in table
    )


def _has_wrapper(row: Row) -> bool:
    return row.hook != "bare"


def _milliseconds(seconds: float | None, spread: float | None) -> str:
    """Format in milliseconds, with the spread if there is one: '12.3 ± 0.4 ms'."""
    if seconds is None:
        return ""
    digits = 1 if abs(seconds) < 0.1 else 0
    spread_text = "" if spread is None else f" ± {1e3 * spread:.{digits}f}"
    return f"{1e3 * seconds:.{digits}f}{spread_text} ms"


def _break_even(row: Row) -> str:
    rate = row.break_even_bits_per_second
    if rate is None:
        return ""
    if math.isinf(rate):
        return "any rate"
    return format_rate(rate) if rate else "never"
