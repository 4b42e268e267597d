"""The group of all commands. Each command is imported when it is needed."""

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from commhooks.errors import CommHookError, did_you_mean

_COMMANDS = {
    "compare": "commhooks.cli.compare:compare",
    "describe": "commhooks.cli.catalog:describe",
    "doctor": "commhooks.cli.doctor:doctor",
    "list": "commhooks.cli.catalog:list_hooks",
    "plan": "commhooks.cli.plan:plan",
    "simulate": "commhooks.cli.simulate:simulate",
}
INTERRUPTED = 130  # the exit status that shells report after Ctrl-C


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            if ctx.resilient_parsing:  # the shell completes a line
                return None
            near = did_you_mean(cmd_name, _COMMANDS)
            ctx.fail(f"no command is named {cmd_name!r}{near or '; see --help'}")
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CommHookError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("\nAborted!", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="commhooks", message="%(package)s %(version)s")
def commands() -> None:
    """Choose a gradient communication hook for data-parallel training."""
    # Find factories in the current directory, as `python -m` does.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
