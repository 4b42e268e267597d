"""``commhooks doctor``: check this machine, also if the extensions do not load."""

import sys

import click
from rich.console import Console
from rich.text import Text

from commhooks.lab.doctor import Health, diagnose

_STYLES = {Health.FINE: "green", Health.ABSENT: "yellow", Health.BROKEN: "bold red"}


@click.command()
def doctor() -> None:
    """Check this machine: versions, extensions, backends, GPUs, tools.

    Says what to install. The exit status is 1 if something is broken.
    """
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
            console.print(
                line, soft_wrap=True
            )  # the terminal wraps, so commands can be copied whole
    if any(finding.health is Health.BROKEN for finding in findings):
        sys.exit(1)
