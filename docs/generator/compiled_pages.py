"""Reference of what mkdocstrings does not see: compiled classes and commands."""

import inspect
from typing import Any

import click

import commhooks
from commhooks.cli.commands import commands as command_group

_WIDTH = 76  # of the help of commands: what a page shows without scrolling


def bucket() -> str:
    """Describe ``GradBucket``, which is a compiled class, by its own docstrings."""
    kind = commhooks.GradBucket
    parts = ["\n## GradBucket { #commhooks.GradBucket }", inspect.getdoc(kind) or ""]
    for name, member in vars(kind).items():
        text = _without_signature(name, inspect.getdoc(member) or "")
        if text and not name.startswith("_"):
            call = "" if isinstance(member, property) else "()"
            parts.append(f"### {name}{call} {{ #commhooks.GradBucket.{name} }}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def _without_signature(name: str, text: str) -> str:
    """Return a docstring without the signature that pybind11 puts first."""
    first, _, rest = text.partition("\n")
    return (rest if first.startswith(f"{name}(") else text).strip()


def commands() -> str:
    """Show the help of each command."""
    context = click.Context(command_group, info_name="commhooks", max_content_width=_WIDTH)
    parts = []
    for name in command_group.list_commands(context):
        command = command_group.get_command(context, name)
        assert command is not None
        parts.append(f"\n## commhooks {name}\n\n{_help(command, name, context)}")
    return "\n".join(parts) + "\n"


def _help(command: click.Command, name: str, parent: Any) -> str:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=_WIDTH)
    context.terminal_width = _WIDTH
    return f"```text\n{command.get_help(context)}\n```"
