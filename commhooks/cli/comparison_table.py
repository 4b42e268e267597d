"""A comparison as two tables, each narrow enough for a terminal of 80 columns."""

import math
from collections.abc import Callable, Mapping

from rich.table import Table
from rich.text import Text

from commhooks.cli.tables import table_of_hooks
from commhooks.lab.comparison import Comparison, Failure, HostPair, Row
from commhooks.lab.units import format_duration, format_rate

__all__ = [
    "costs_columns",
    "costs_table",
    "explanations",
    "failures_of",
    "format_bytes",
    "format_pair",
    "format_seconds",
    "kind_of",
    "pairs_table",
    "times_columns",
    "times_table",
]

_TIMES_CAPTION = """\
step: forward and backward on the slowest rank; median, and distance between the quartiles.
of torch: the step divided by that of torch DDP.
exposed: the time that averaging adds to a step of the bare model."""
_PAIRS_CAPTION = """\
rate: of the slower direction, one pair at a time.
latency: of a message of 1 byte in one direction.
slow: less than half of the rate of the fastest pair."""
_COSTS_CAPTION = """\
wire: bytes that one rank sends per step.
ratio: bytes of plain averaging divided by those of the hook.
error: relative error of one step's gradients against the exact mean.
memory: peak, besides the parameters."""
_BREAK_EVEN = "break-even: the hook is faster than torch DDP on links below this rate."


def times_columns(comparison: Comparison) -> dict[str, Callable[[Row], str]]:
    """Return the columns of times, by name."""
    columns: dict[str, Callable[[Row], str]] = {
        "step": lambda row: format_seconds(row.step_seconds),
        "": _spread,
        "of torch": lambda row: "" if row.hook == "bare" else f"{row.to_torch:.2f}",
        "exposed": lambda row: "" if row.hook == "bare" else format_seconds(row.exposed_seconds),
    }
    if any(row.training for row in comparison.rows):
        columns["loss"] = _loss
    return columns


def costs_columns(comparison: Comparison) -> dict[str, Callable[[Row], str]]:
    """Return the columns of what does not depend on the link, by name."""
    columns: dict[str, Callable[[Row], str]] = {
        "wire": lambda row: format_bytes(row.wire_bytes) if row.wire_bytes else "",
        "ratio": lambda row: "" if row.ratio is None else f"{row.ratio:.1f}x",
        "error": lambda row: "" if row.error is None else f"{row.error:.1e}",
        "memory": lambda row: format_bytes(row.peak_bytes),
    }
    if any(row.break_even_bits_per_second is not None for row in comparison.rows):
        columns["break-even"] = _break_even
    return columns


def explanations(comparison: Comparison) -> list[str]:
    """Return a line for each column of the tables, which begins with its name."""
    lines = _TIMES_CAPTION.splitlines() + _COSTS_CAPTION.splitlines()
    if "break-even" in costs_columns(comparison):
        lines.append(_BREAK_EVEN)
    return lines + (_PAIRS_CAPTION.splitlines() if comparison.pairs else [])


def kind_of(comparison: Comparison, link: str) -> str:
    """Return "measured" or "predicted"."""
    return "measured" if comparison.row("torch", link).measured else "predicted"


def failures_of(comparison: Comparison, link: str) -> list[Failure]:
    """Return the hooks that failed over a link; over the first one, those that cannot be made."""
    first = comparison.links[0]
    return [failure for failure in comparison.failures if (failure.link or first) == link]


def format_pair(comparison: Comparison, pair: HostPair) -> tuple[str, str, str, str]:
    """Return the names, the rate, the latency and "slow" or nothing."""
    return (
        f"{pair.first} - {pair.second}",
        format_rate(pair.bits_per_second),
        format_duration(pair.latency_seconds),
        "slow" if pair in comparison.slow_pairs else "",
    )


def times_table(comparison: Comparison) -> Table:
    """Make the table of times: a section per link, with one row per entry."""
    columns = times_columns(comparison)
    gradient_bytes = format_bytes(comparison.rows[0].gradient_bytes)
    title = f"{comparison.model}, {comparison.world_size} ranks, {gradient_bytes} of gradients"
    table = table_of_hooks(columns, title=title, caption=_TIMES_CAPTION)
    for link in comparison.links:
        table.add_row(Text(f"{link}, {kind_of(comparison, link)}", style="bold"))
        for row in comparison.rows:
            if row.link == link:
                _add(table, f"  {row.hook}", row, columns)
        for failure in failures_of(comparison, link):
            table.add_row(Text(f"  {failure.hook}"), "failed")
        table.add_section()
    return table


def costs_table(comparison: Comparison) -> Table:
    """Make the table of what does not depend on the link, with one row per entry."""
    columns = costs_columns(comparison)
    caption = _COSTS_CAPTION
    if "break-even" in columns:
        caption += f"\n{_BREAK_EVEN}"
    table = table_of_hooks(columns, caption=caption)
    for hook in comparison.hooks:
        _add(table, hook, comparison.row(hook, comparison.links[0]), columns)
    return table


def pairs_table(comparison: Comparison) -> Table:
    """Make the table of the network between hosts, the slowest pair first."""
    table = table_of_hooks(
        ("rate", "latency", ""), first="pair of hosts", title="network", caption=_PAIRS_CAPTION
    )
    for pair in sorted(comparison.pairs, key=lambda pair: pair.bits_per_second):
        names, *cells = format_pair(comparison, pair)
        table.add_row(Text(names), *cells)
    return table


def format_bytes(count: float | None) -> str:
    """Format with a decimal unit: 3337216 -> '3.34 MB'."""
    if count is None:
        return "-"
    units = ["B", "kB", "MB", "GB", "TB"]
    while float(f"{count:.3g}") >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


def format_seconds(seconds: float | None) -> str:
    """Format in milliseconds: 0.01234 -> '12.3 ms'."""
    if seconds is None:
        return "-"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{1 if abs(milliseconds) < 100 else 0}f} ms"


def _add(table: Table, name: str, row: Row, columns: Mapping[str, Callable[[Row], str]]) -> None:
    table.add_row(Text(name), *(cell(row) for cell in columns.values()))


def _spread(row: Row) -> str:
    return "" if row.step_spread_seconds is None else f"± {1e3 * row.step_spread_seconds:.1f}"


def _break_even(row: Row) -> str:
    rate = row.break_even_bits_per_second
    if rate is None:
        return ""
    if math.isinf(rate):
        return "any rate"
    return format_rate(rate) if rate else "never"


def _loss(row: Row) -> str:
    return "" if row.validation_loss is None else f"{row.validation_loss:.4g}"
