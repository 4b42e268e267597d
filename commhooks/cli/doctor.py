"""``commhooks doctor``: check this machine, also if the extensions do not load."""

import sys

import click

from commhooks.lab.doctor import Health, diagnose

_COLORS = {Health.FINE: "green", Health.ABSENT: "yellow", Health.BROKEN: "red"}


@click.command()
def doctor() -> None:
    """Check this machine: versions, extensions, backends, GPUs, tools.

    Says what to install. The exit status is 1 if something is broken.
    """
    findings = diagnose()
    part_width = max(len(finding.part) for finding in findings)
    health_width = max(len(health.value) for health in Health)
    for finding in findings:
        part = f" {finding.part:<{part_width}}  "
        health = f"{finding.health.value:<{health_width}}  "
        click.echo(f"{part}{click.style(health, fg=_COLORS[finding.health])}{finding.found}")
        if finding.remedy:
            click.secho(" " * len(part + health) + finding.remedy, dim=True)
    if any(finding.health is Health.BROKEN for finding in findings):
        sys.exit(1)
