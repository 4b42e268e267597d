"""A comparison as a table."""

import math

from rich import box
from rich.table import Table
from rich.text import Text

from commhooks.comparison import Comparison, Row
from commhooks.rates import format_rate

__all__ = ["comparison_table", "format_bytes", "format_seconds"]

_COLUMNS = ["step", "", "of torch", "exposed", "wire", "ratio", "error", "memory", "pays below"]
_HOOK_WIDTH = 22
_CAPTION = """\
step: forward and backward of the slowest rank, median, and the spread between the quartiles.
of torch: that time over that of torch's own averaging. exposed: what a step takes longer than \
that of the bare model.
ratio: what plain averaging sends over what the hook sends. error: of one step's gradients against \
the exact mean.
memory: peak, besides the parameters. pays below: the rate of a link below which the hook is \
faster than torch's averaging."""


def comparison_table(comparison: Comparison) -> Table:
    """A section per link, one row per contender."""
    gradient_bytes = format_bytes(comparison.rows[0].gradient_bytes)
    table = Table(
        title=f"{comparison.model}, {comparison.world_size} ranks, {gradient_bytes} of gradients",
        caption=_CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    trained = any(row.training for row in comparison.rows)
    table.add_column("hook", overflow="fold", min_width=_HOOK_WIDTH)
    for name in _COLUMNS + ["loss"] * trained:
        table.add_column(name, justify="right", no_wrap=True)
    for link in comparison.links:
        kind = "measured" if comparison.row("torch", link).measured else "predicted"
        table.add_row(Text(f"{link}, {kind}", style="bold"))
        for hook in comparison.hooks:
            row = comparison.row(hook, link)
            table.add_row(Text(f"  {hook}"), *_cells(row), *[_loss(row)] * trained)
        table.add_section()
    return table


def format_bytes(count: float | None) -> str:
    """With a decimal unit: 3337216 -> '3.34 MB'."""
    if count is None:
        return "-"
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


def format_seconds(seconds: float | None) -> str:
    """In milliseconds: 0.01234 -> '12.3 ms'."""
    if seconds is None:
        return "-"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{1 if abs(milliseconds) < 100 else 0}f} ms"


def _cells(row: Row) -> list[str]:
    is_bare = row.hook == "bare"
    return [
        format_seconds(row.step_seconds),
        "" if row.step_spread_seconds is None else f"± {1e3 * row.step_spread_seconds:.1f}",
        "" if is_bare else f"{row.to_torch:.2f}",
        "" if is_bare else format_seconds(row.exposed_seconds),
        format_bytes(row.wire_bytes) if row.wire_bytes else "",
        "" if row.ratio is None else f"{row.ratio:.1f}x",
        "" if row.error is None else f"{row.error:.1e}",
        format_bytes(row.peak_bytes),
        _rate(row.break_even_bits_per_second),
    ]


def _rate(rate: float | None) -> str:
    if rate is None:
        return ""
    if math.isinf(rate):
        return "any rate"
    return format_rate(rate) if rate else "never"


def _loss(row: Row) -> str:
    return "" if row.validation_loss is None else f"{row.validation_loss:.4g}"
