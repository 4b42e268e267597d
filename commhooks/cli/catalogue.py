"""``commhooks list`` and ``commhooks describe``: what hooks there are."""

import click
from rich.console import Console
from rich.table import Table

from commhooks.registry import HookInfo, available
from commhooks.registry import describe as describe_hook

__all__ = ["describe", "list_hooks"]


@click.command(name="list")
def list_hooks() -> None:
    """Show all hooks and what they send."""
    table = Table(caption="commhooks describe NAME shows the options.", caption_justify="left")
    table.add_column("hook", no_wrap=True)
    table.add_column("exact")
    table.add_column("ranks agree")
    table.add_column("what is sent")
    table.add_column("paper", no_wrap=True)
    for name in available():
        info = describe_hook(name)
        row = (name, _exact(info), _yes(info.consensus), info.wire or info.summary, _paper(info))
        table.add_row(*row)
    Console().print(table)


@click.command()
@click.argument("name")
def describe(name: str) -> None:
    """Show the options of the hook NAME, what it sends, and where it is from."""
    click.echo(describe_hook(name))


def _exact(info: HookInfo) -> str:
    wraps = info.lossless and any("CommHook" in option.type for option in info.options)
    return "as its hooks" if wraps else _yes(info.lossless)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _paper(info: HookInfo) -> str:
    return info.paper.removeprefix("https://").removeprefix("arxiv.org/abs/")
