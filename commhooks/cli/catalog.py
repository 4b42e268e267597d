"""``commhooks list`` and ``commhooks describe``: the hooks and their options."""

import click
from rich import box
from rich.console import Console
from rich.table import Table

from commhooks.hook.registry import HookInfo, available
from commhooks.hook.registry import describe as describe_hook

__all__ = ["describe", "list_hooks"]

_CAPTION = """\
average: whether the average is exact, and whether it differs between ranks.
loss: change of the validation loss in percent, relative to plain averaging, on two tasks: \
digits, bytes.
`commhooks describe NAME` shows the options, the paper, and the number of seeds."""


@click.command(name="list")
def list_hooks() -> None:
    """List all hooks, what they send and how exact they are."""
    table = Table(
        caption=_CAPTION, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("hook", no_wrap=True)
    table.add_column("average", max_width=12)
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("sent")
    for name in available():
        info = describe_hook(name)
        table.add_row(name, _average(info), _loss(info), info.wire or info.summary)
    Console().print(table)


@click.command()
@click.argument("name")
def describe(name: str) -> None:
    """Show the options, the cost and the source of the hook NAME."""
    click.echo(describe_hook(name))


def _average(info: HookInfo) -> str:
    wraps = info.lossless and any("CommHook" in option.type for option in info.options)
    kind = "as inner" if wraps else "exact" if info.lossless else "lossy"
    return kind if info.consensus else f"{kind}, ranks differ"


def _loss(info: HookInfo) -> str:
    if info.fidelity is None:
        return ""
    changes = (info.fidelity.digits, info.fidelity.bytes)
    return ", ".join("-" if change is None else f"{change:+.1f}" for change in changes)
