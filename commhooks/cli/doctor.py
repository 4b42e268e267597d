"""``commhooks doctor``: what this machine can do, and what to install."""

import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commhooks.diagnosis import Health, diagnose

__all__ = ["doctor"]

_NARROWEST = 120  # columns
_STYLES = {Health.FINE: "green", Health.ABSENT: "yellow", Health.BROKEN: "bold red"}


@click.command()
def doctor() -> None:
    """Say what this machine can do and what does not fit together; exit status 1 if broken."""
    findings = diagnose()
    table = Table(show_header=False, box=None)
    for finding in findings:
        health = Text(finding.health.value, style=_STYLES[finding.health])
        table.add_row(finding.part, health, Text(finding.found))
        if finding.remedy:
            table.add_row("", "", Text(finding.remedy, style="dim"))
    console = Console()
    console.width = max(console.width, _NARROWEST)  # commands are not to be cut
    console.print(table)
    if any(finding.health is Health.BROKEN for finding in findings):
        sys.exit(1)
