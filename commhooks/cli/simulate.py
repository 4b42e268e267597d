"""``commhooks simulate``: predict steps on a cluster that is not available."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from commhooks.cli.common import (
    FILE,
    IMAGE,
    TargetCluster,
    cluster_options,
    draw,
    hooks_option,
    model_options,
    show_failures,
    usable_hooks,
    write_files,
)
from commhooks.costs.network import Network
from commhooks.costs.units import aligned, format_duration
from commhooks.errors import CommHookOptionError
from commhooks.hook.spec import HookSpec
from commhooks.lab.machine import describe_machine
from commhooks.lab.simulation import BASELINE, Job, Measurements, Study, curve_sizes, measure
from commhooks.lab.verdict import FALLBACK, fidelity_text


@click.command()
@model_options
@hooks_option(
    "Hooks with their options, for example int8,powersgd:rank=4 or my_module:MyHook. Plain "
    "averaging (allreduce) and bf16 are always added."
)
@cluster_options
@click.option(
    "--step",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    help="First of the 1000 training steps whose mean is predicted.",
)
@click.option(
    "--measurements",
    type=FILE,
    help="Save the measurements of this machine to this file, and reuse those that it has.",
)
@click.option("--plot", type=IMAGE, help="Draw step time against the number of ranks.")
@click.option("--json", "json_file", type=FILE, help="Write all figures to this file.")
def simulate(
    model: str,
    input_factory: str | None,
    wrapper: Mapping[str, Any],
    hooks: Sequence[str],
    cluster: TargetCluster,
    step: int,
    measurements: Path | None,
    plot: Path | None,
    json_file: Path | None,
) -> None:
    """Predict the time of a training step with each hook on a cluster.

    The model and the hooks are measured on this machine first, which takes seconds to minutes. The
    network, and what overlaps with it, is simulated. docs/scaling.md explains the method and its
    limits. A hook that cannot be simulated is left out, a line says why, and the exit status is 1.
    """
    network = cluster.network
    specs, reasons = usable_hooks(hooks, model, cluster.backend, BASELINE, FALLBACK)
    here = cluster.ranks_per_node
    job = cluster.job(model, input_factory, wrapper, ranks_per_machine=here, first_step=step)
    known = _measured(job, specs, network, measurements, has_curve=bool(plot or json_file))
    why = {spec.text: known.reason(spec, network.size) for spec in specs}
    reasons |= {text: reason for text, reason in why.items() if reason}
    study = Study(
        hooks={str(spec): known.of(spec) for spec in specs if spec.text not in reasons},
        network=network,
        backend=cluster.costs(known.gloo),
        cores=cluster.cores_of_rank,
    )
    study = replace(study, speed=cluster.speed_for(study.alone_seconds))
    title = cluster.title(model, study.speed)

    def write(path: Path) -> None:
        figures = study.to_json() | {"model": model, "failures": reasons}
        path.write_text(json.dumps(figures, indent=1) + "\n")

    unwritten = write_files((plot, draw("draw_curves", study, model)), (json_file, write))
    click.echo(f"{title}\n\n{_table(study, reasons)}")
    Console().print(study.advice, markup=False, highlight=False)
    show_failures(reasons, unwritten)


def _measured(
    job: Job, specs: Sequence[HookSpec], network: Network, path: Path | None, *, has_curve: bool
) -> Measurements:
    """Return the measurements in the file; measure missing ones first, and save them.

    What a file gets also serves curves.
    """
    sizes = curve_sizes(network) if has_curve or path else [network.size]
    known = Measurements.load(path) if path is not None and path.exists() else None
    if known is not None and known.job != job:
        raise CommHookOptionError(
            f"{path}: expected measurements of {job}, found those of {known.job}; use another file"
        )

    def is_known(spec: HookSpec) -> bool:
        if known is None or spec not in known:
            return False
        return known.of(spec).has(network.size) or network.size in known.of(spec).failures

    missing = [spec for spec in specs if not is_known(spec)]
    if missing and known is not None and known.machine != (here := describe_machine(job.device)):
        raise CommHookOptionError(
            f"{path} lacks {', '.join(map(str, missing))} for {network.size} ranks; expected the "
            f"machine that it was measured on, {dict(known.machine)}, found {here}; use another "
            "file"
        )
    if missing:
        console = Console(stderr=True)
        with console.status(f"measuring {job.model} with {len(missing)} hooks"):
            found = measure(job, missing, sizes)
        if known is not None:
            dry_runs = {**known.dry_runs, **found.dry_runs}
            found = replace(known, dry_runs=dry_runs, reasons=found.reasons)
        known = found
        if unwritten := write_files((path, known.save)):
            click.echo(f"Error: {unwritten}", err=True)
    assert known is not None
    return known


def _table(study: Study, failed: Iterable[str]) -> str:
    baseline = study.predictions[BASELINE]
    heads = ("hook", "step", "exposed", "speed-up", "MB sent", "fidelity", "break-even")
    hooks = (
        (
            hook,
            format_duration(prediction.step_seconds),
            format_duration(prediction.exposed_seconds),
            f"{baseline.step_seconds / prediction.step_seconds:.2f}",
            f"{prediction.wire_bytes / 1e6:.1f}",
            fidelity_text(hook),
            "" if hook == BASELINE else str(study.break_even(hook) or "never"),
        )
        for hook, prediction in study.predictions.items()
    )
    return f"""{aligned([heads, *hooks, *((hook, "failed") for hook in failed)])}

step: forward and backward.
exposed: the time that communication adds to {format_duration(study.alone_seconds)}.
MB sent: by one rank.
fidelity: largest change of the validation loss in small trainings, at default options.
break-even: the rates of links at which it beats allreduce.
"""
