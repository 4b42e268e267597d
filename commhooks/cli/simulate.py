"""``commhooks simulate``: predict steps on a cluster that is not available."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from commhooks.cli.parameters import (
    FILE,
    IMAGE,
    cluster_options,
    cores_of_rank,
    hooks_option,
    input_option,
    model_option,
    network_of,
    usable_hooks,
)
from commhooks.cli.tables import show_failures, table_of_hooks
from commhooks.errors import CommHookOptionError
from commhooks.hook.spec import HookSpec, parse_hook_spec
from commhooks.lab.simulation import (
    BASELINE,
    NCCL,
    Job,
    Measurements,
    Study,
    dry_run_sizes,
    measure,
)
from commhooks.lab.units import format_duration, format_rate

__all__ = ["simulate"]


@click.command()
@model_option
@input_option
@hooks_option(
    "Hooks with their options, for example bf16,powersgd:rank=4. Plain averaging (allreduce) is "
    "always added."
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
    hooks: Sequence[str],
    world_size: int,
    link: float,
    latency: float,
    ranks_per_node: int,
    node_link: float | None,
    backend: str,
    cores: float | None,
    speed: float,
    bucket_cap_mb: float | None,
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
    network = network_of(world_size, link, latency, ranks_per_node, node_link)
    usable, reasons = usable_hooks(hooks, model, backend)
    specs = _with_baseline(usable)
    job = Job(
        model,
        input_factory,
        ranks_per_node=ranks_per_node,
        ranks_per_machine=ranks_per_node,
        bucket_cap_mb=bucket_cap_mb,
        first_step=step,
    )
    known = _measured(job, specs, world_size, measurements)
    reasons |= {s.text: reason for s in specs if (reason := known.reason(s.config)) is not None}
    study = Study(
        hooks={str(spec): known.of(spec.config) for spec in specs if spec.text not in reasons},
        network=network,
        backend=NCCL() if backend == "nccl" else known.gloo,
        cores=cores_of_rank(cores, ranks_per_node),
        speed=speed,
    )
    if plot is not None:
        _plot(study, plot, model)
    if json_file is not None:
        figures = study.to_json() | {"model": model, "failures": reasons}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    console = Console()
    console.print(_table(study, model, reasons))
    console.print(study.advice, highlight=False)
    show_failures(console, (f"{hook}: {reason}" for hook, reason in reasons.items()))


def _with_baseline(specs: Sequence[HookSpec]) -> list[HookSpec]:
    """Return each hook once, with plain averaging first unless it is among the hooks."""
    baseline = [] if any(str(spec) == BASELINE for spec in specs) else [parse_hook_spec(BASELINE)]
    return list({str(spec): spec for spec in [*baseline, *specs]}.values())


def _measured(
    job: Job, specs: Sequence[HookSpec], world_size: int, path: Path | None
) -> Measurements:
    """Return the measurements in the file, after measuring and saving what it lacks."""
    configs = [spec.config for spec in specs]
    sizes = dry_run_sizes([world_size], job.ranks_per_node)
    known = Measurements.load(path) if path is not None and path.exists() else None
    if known is not None and known.job != job:
        raise CommHookOptionError(
            f"{path}: expected measurements of {job}, found those of {known.job}; use another file"
        )
    missing = configs if known is None else known.lacking(configs, sizes)
    if missing:
        console = Console(stderr=True)
        with console.status(f"measuring {job.model} with {len(missing)} hooks"):
            found = measure(job, missing, sizes)
        known = found if known is None else known.with_more(found)
        if path is not None:
            known.save(path)
    assert known is not None
    return known


def _table(study: Study, model: str, failed: Iterable[str]) -> Table:
    network, baseline = study.network, study.predictions[BASELINE]
    table = table_of_hooks(
        ("step", "exposed", "speed-up", "of alone", "MB sent", "break-even"),
        title=f"{model}, {network.size} ranks at {format_rate(network.link.bits_per_second)}, "
        f"{format_duration(network.link.latency_seconds)}; predicted",
        caption="step: forward and backward. exposed: the time that communication adds.\n"
        f"of alone: a step without communication ({format_duration(study.alone_seconds)}) divided "
        "by this step.\n"
        "MB sent: by one rank. break-even: the rates of links at which it beats allreduce.",
    )
    for hook, prediction in study.predictions.items():
        table.add_row(
            hook,
            format_duration(prediction.step_seconds),
            format_duration(prediction.exposed_seconds),
            f"{baseline.step_seconds / prediction.step_seconds:.2f}",
            f"{study.alone_seconds / prediction.step_seconds:.0%}",
            f"{prediction.wire_bytes / 1e6:.1f}",
            "" if hook == BASELINE else str(study.break_even(hook) or "never"),
        )
    for hook in failed:
        table.add_row(hook, "failed")
    return table


def _plot(study: Study, path: Path, model: str) -> None:
    from commhooks.cli.simulation_plot import draw_curves  # takes a second to import

    rate = format_rate(study.network.link.bits_per_second)
    try:
        draw_curves(study, path, f"{model} at {rate}, predicted")
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--plot {path}: {error}") from error
