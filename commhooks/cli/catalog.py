"""``commhooks list`` and ``commhooks describe``: the hooks and their options."""

import textwrap

import click

from commhooks.cli.common import import_option, show_failures
from commhooks.costs.units import aligned
from commhooks.errors import CommHookError
from commhooks.hook.registry import HookInfo, available
from commhooks.hook.registry import describe as describe_hook
from commhooks.lab.simulation.dry_run import usual_ratio

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
_CAPTION = """
average: exact, lossy, or lossy and different between ranks.
fewer: bytes of plain averaging divided by those of the hook, for a matrix of
  1024 x 1024 on 8 ranks, after warm-ups.
digits, bytes, gpt: change of the validation loss in percent in three small
  trainings.
Figures are for the default options. A hook can be registered by its name
alone, unless the table says what it needs. `commhooks describe NAME` shows the
options, what is sent, the paper, and the number of seeds."""
_TASKS = ("digits", "bytes", "gpt")
_WIDTH = 76  # of texts


@click.command(name="list")
@import_option
def list_hooks() -> None:
    """List all hooks by family, how much they send and how exact they are."""
    lines: list[tuple[str, ...]] = [("hook", "average", "fewer", *_TASKS)]
    infos, failures = list[HookInfo](), dict[str, str]()
    for name in available():
        try:
            infos.append(describe_hook(name))
        except CommHookError as error:  # a hook of another package that cannot be imported
            failures[name] = str(error)
    for family, title in _FAMILIES.items():
        members = [info for info in infos if info.family == family]
        lines += [(title,)] if members else []
        for info in members:
            ratio = usual_ratio(info.name) if family != "wrappers" else None
            fewer = f"{ratio:.1f}x" if ratio else ""
            lines.append((f"  {info.name}", _average(info), fewer, *_losses(info)))
            needs = f"needs {', '.join(info.needs)}" if info.needs else ""
            lines += [(f"    {text}",) for text in textwrap.wrap(needs, _WIDTH)]
    click.echo(f"{aligned(lines, left=(0, 1))}\n{_CAPTION}")
    show_failures(failures, is_error=False)


@click.command()
@import_option
@click.argument("name")
def describe(name: str) -> None:
    """Show the options, the cost and the source of the hook NAME, or of my_module:MyHook."""
    known, _, options = name.partition(":")
    if "=" in options and known in available():
        raise CommHookError(f"expected a name without options, found {name!r}; use {known!r}")
    click.echo(describe_hook(name))


def _average(info: HookInfo) -> str:
    if info.lossless:
        return "as inner" if any("CommHook" in option.type for option in info.options) else "exact"
    return "lossy" if info.consensus else "different"


def _losses(info: HookInfo) -> list[str]:
    if info.fidelity is None:
        return [""] * len(_TASKS)
    changes = map(info.fidelity.changes.get, _TASKS)
    return ["-" if change is None else f"{change:+.1f}" for change in changes]
