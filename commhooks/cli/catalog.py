"""``commhooks list`` and ``commhooks describe``: the hooks and their options."""

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commhooks.hook.registry import HookInfo, available
from commhooks.hook.registry import describe as describe_hook

__all__ = ["describe", "list_hooks"]

_FAMILIES = {
    "exact": "exact or half",
    "quantized": "quantized",
    "sparse": "sparse",
    "lowrank": "low rank",
    "averaging": "averaging",
    "wrappers": "wrappers",
    "adaptive": "hooks that adapt",
    "": "other packages",
}
_CAPTION = """\
average: exact, lossy, or lossy and different between ranks.
loss: change of the validation loss in percent, relative to plain averaging, on \
three tasks: digits, bytes, gpt.
A hook can be registered by its name alone, unless the table says what it needs.
`commhooks describe NAME` shows the options, the paper, and the number of seeds."""


@click.command(name="list")
def list_hooks() -> None:
    """List all hooks by family, what they send and how exact they are."""
    table = Table(
        caption=_CAPTION, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("hook", overflow="fold")
    table.add_column("average", no_wrap=True)
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("sent")
    infos = [describe_hook(name) for name in available()]
    for family, title in _FAMILIES.items():
        members = [info for info in infos if info.family == family]
        if members:
            table.add_row(Text(title, style="bold"))
        for info in members:
            table.add_row(f"  {info.name}", _average(info), _loss(info), _sent(info))
        table.add_section()
    Console().print(table)


@click.command()
@click.argument("name")
def describe(name: str) -> None:
    """Show the options, the cost and the source of the hook NAME."""
    click.echo(describe_hook(name))


def _average(info: HookInfo) -> str:
    if info.lossless:
        return "as inner" if any("CommHook" in option.type for option in info.options) else "exact"
    return "lossy" if info.consensus else "different"


def _sent(info: HookInfo) -> Text:
    text = Text(info.wire or info.summary)
    return text.append(f"\nneeds {', '.join(info.needs)}", "italic") if info.needs else text


def _loss(info: HookInfo) -> str:
    if info.fidelity is None:
        return ""
    changes = info.fidelity.changes.values()
    return ", ".join("-" if change is None else f"{change:+.1f}" for change in changes)
