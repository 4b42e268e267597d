"""Tables of figures, one row per hook, for a terminal."""

import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["show_failures", "table_of_hooks"]


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


def show_failures(
    console: Console, failures: Iterable[object], status: int = 0, *, is_error: bool = True
) -> None:
    """Print a line for each hook that failed, then exit with status 1 or with ``status``.

    Do not exit if ``status`` is 0 and nothing failed, or that is no error.
    """
    for failure in failures:
        line = Text.assemble(("Failed: ", "bold red"), str(failure))
        console.print(line, soft_wrap=True)  # one line in a pipe
        status = status or int(is_error)
    if status:
        sys.exit(status)
