"""Tables of figures, one row per hook, for a terminal."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

__all__ = ["table_of_hooks"]


def table_of_hooks(
    columns: Iterable[str], *, caption: str, title: str | None = None, first: str = "hook"
) -> Table:
    """Make an empty table: a column ``first``, then right-aligned ``columns``."""
    table = Table(
        title=title,
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
