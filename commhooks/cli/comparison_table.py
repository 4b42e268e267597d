"""A comparison as a table."""

import math

from rich.table import Table
from rich.text import Text

from commhooks.comparison import Comparison, Row
from commhooks.rates import format_rate

__all__ = ["comparison_table", "format_bytes", "format_seconds"]

_CAPTION = """\
step: forward and backward of the slowest rank, median, and the spread between the quartiles.
of torch: that time over that of torch's own averaging. exposed: what a step takes longer than \
that of the bare model.
ratio: what plain averaging sends over what the hook sends. error: of one step's gradients against \
the exact mean.
memory: peak, besides the parameters. pays below: the rate of a link below which the hook is \
faster than torch's averaging."""


def comparison_table(comparison: Comparison) -> Table:
    """One row per contender; what depends on the link comes last, link by link."""
    gradient_bytes = format_bytes(comparison.rows[0].gradient_bytes)
    table = Table(
        title=f"{comparison.model}, {comparison.world_size} ranks, {gradient_bytes} of gradients",
        caption=_CAPTION,
        caption_justify="left",
    )
    trained = any(row.training for row in comparison.rows)
    table.add_column("hook", no_wrap=True)
    for name in ("wire\nbytes", "ratio", "error", "memory", "pays below"):
        table.add_column(name, justify="right", no_wrap=True)
    if trained:
        table.add_column("loss", justify="right", no_wrap=True)
    for link in comparison.links:
        kind = "measured" if comparison.row("torch", link).measured else "predicted"
        table.add_column(f"{link}\n({kind})", justify="right", no_wrap=True)
        table.add_column("of\ntorch", justify="right", no_wrap=True)
        table.add_column("\nexposed", justify="right", no_wrap=True)
    for hook in comparison.hooks:
        rows = [comparison.row(hook, link) for link in comparison.links]
        cells = _common(rows[0])
        if trained:
            cells.append(_loss(rows))
        for row in rows:
            cells += _of_link(row)
        table.add_row(*cells)
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
    """In ms below 1 s."""
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"


def _common(row: Row) -> list[str | Text]:
    return [
        Text(row.hook),  # which may have brackets, rich's markup
        format_bytes(row.wire_bytes) if row.wire_bytes else "-",
        "-" if row.ratio is None else f"{row.ratio:.3g}x",
        "-" if row.error is None else f"{row.error:.2g}",
        format_bytes(row.peak_bytes),
        _rate(row.break_even_bits_per_second),
    ]


def _of_link(row: Row) -> list[str]:
    spread = "" if row.step_spread_seconds is None else f" ± {1e3 * row.step_spread_seconds:.2g}"
    step = f"{1e3 * row.step_seconds:.3g}{spread} ms"
    if row.hook == "bare":
        return [step, "", ""]
    return [step, f"{row.to_torch:.2f}", format_seconds(row.exposed_seconds)]


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    if math.isinf(rate):
        return "any rate"
    return format_rate(rate) if rate else "never"


def _loss(rows: list[Row]) -> str:
    losses = [row.validation_loss for row in rows if row.validation_loss is not None]
    return f"{losses[-1]:.4g}" if losses else "-"
