"""``commhooks doctor``: what this machine can do, and what to install."""

import sys

import click
from rich.console import Console
from rich.text import Text

from commhooks.lab.doctor import Health, diagnose

__all__ = ["doctor"]

_STYLES = {Health.FINE: "green", Health.ABSENT: "yellow", Health.BROKEN: "bold red"}


@click.command()
def doctor() -> None:
    """Say what this machine can do and what does not fit together; exit status 1 if broken."""
    findings = diagnose()
    console = Console()
    part_width = max(len(finding.part) for finding in findings)
    health_width = max(len(health.value) for health in Health)
    for finding in findings:
        part = f" {finding.part:<{part_width}}  "
        health = f"{finding.health.value:<{health_width}}  "
        lines = [Text.assemble(part, (health, _STYLES[finding.health]), finding.found)]
        if finding.remedy:
            lines.append(Text(" " * len(part + health) + finding.remedy, style="dim"))
        for line in lines:
            console.print(line, soft_wrap=True)  # the terminal wraps: commands stay in one piece
    if any(finding.health is Health.BROKEN for finding in findings):
        sys.exit(1)
