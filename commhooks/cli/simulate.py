"""``commhooks simulate``: what a step would take on a cluster that is not there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from commhooks.cli.parameters import FILE, IMAGE, RATE, hooks_option
from commhooks.errors import CommHookOptionError
from commhooks.hook.spec import HookSpec, parse_hook_spec
from commhooks.lab.machine import cores as cores_here
from commhooks.lab.models import built_in_models
from commhooks.lab.simulation import (
    BASELINE,
    NCCL,
    Link,
    Measurements,
    Network,
    Study,
    Subject,
    measure,
    rehearsed_sizes,
)
from commhooks.lab.units import format_duration, format_rate, parse_duration

__all__ = ["simulate"]


class _Duration(click.ParamType):  # type: ignore[type-arg]
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option(
    "--model",
    required=True,
    help=f"{', '.join(built_in_models())}, or package.module:factory.",
)
@click.option("--input", "input_", help="package.module:function that returns the model's input.")
@hooks_option("Hooks with options, as in bf16,powersgd:rank=4. The plain average is always shown.")
@click.option("--world-size", type=click.IntRange(min=2), required=True, help="Number of ranks.")
@click.option("--link", type=RATE, required=True, help="Rate of each node's link, as in 25gbit.")
@click.option("--latency", type=_Duration(), default="20us", help="Of the network, one way.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=1)
@click.option("--node-link", type=RATE, help="Rate of each rank inside its node; default: --link.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), default="gloo")
@click.option(
    "--cores",
    type=click.FloatRange(min=0, min_open=True),
    help="Of each node, which its ranks share; default: those of this machine, but one per rank.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    help="How many times faster than this machine the ranks compute.",
)
@click.option("--bucket-cap-mb", type=click.FloatRange(min=0, min_open=True))
@click.option(
    "--step", type=click.IntRange(min=0), default=1000, help="The first of the steps to look at."
)
@click.option(
    "--measurements",
    type=FILE,
    help="Keep in this file what is measured here; use it if it is there.",
)
@click.option("--plot", type=IMAGE, help="Image of curves.")
@click.option("--json", "json_file", type=FILE, help="Write all figures to this file.")
def simulate(
    model: str,
    input_: str | None,
    hooks: Sequence[HookSpec],
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
    """Predict what a step takes with hooks on a network that is not there.

    The model and the hooks are measured here first, alone, which takes seconds; the network, and
    what overlaps on it, is computed. docs/scaling.md says how, and where that fails.
    """
    network = Network(
        world_size, Link(link, latency), Link(node_link or link, latency_seconds=0), ranks_per_node
    )
    specs = _with_baseline(hooks)
    _check_backend(specs, backend)
    subject = Subject(model, input_, ranks_per_node, ranks_per_node, bucket_cap_mb, step)
    known = _measured(subject, specs, world_size, measurements)
    study = Study(
        hooks={str(spec): known.of(spec.config) for spec in specs},
        network=network,
        backend=NCCL() if backend == "nccl" else known.gloo,
        cores=(cores or max(cores_here(), ranks_per_node)) / ranks_per_node,
        speed=speed,
    )
    if plot is not None:
        _plot(study, plot, model)
    if json_file is not None:
        json_file.write_text(json.dumps(study.to_json() | {"model": model}, indent=1) + "\n")
    Console().print(_table(study, model))
    Console().print(study.advice, highlight=False)


def _with_baseline(specs: Sequence[HookSpec]) -> list[HookSpec]:
    """Each hook once, the plain average first unless it is elsewhere."""
    baseline = [] if any(str(spec) == BASELINE for spec in specs) else [parse_hook_spec(BASELINE)]
    return list({str(spec): spec for spec in [*baseline, *specs]}.values())


def _check_backend(specs: Sequence[HookSpec], backend: str) -> None:
    for spec in specs:
        backends = spec.create().backends
        if backend not in backends:
            raise CommHookOptionError(
                f"hook {str(spec)!r} works with {', '.join(backends)}, found --backend {backend}"
            )


def _measured(
    subject: Subject, specs: Sequence[HookSpec], world_size: int, path: Path | None
) -> Measurements:
    """Those in the file, of whatever it has, and the rest from here."""
    configs = [spec.config for spec in specs]
    sizes = rehearsed_sizes([world_size], subject.ranks_per_node)
    known = Measurements.load(path) if path is not None and path.exists() else None
    if known is not None and known.subject != subject:
        raise CommHookOptionError(
            f"{path} has measurements of {known.subject}, expected {subject}; name another file"
        )
    missing = configs if known is None else known.lacking(configs, sizes)
    if missing:
        console = Console(stderr=True)
        with console.status(f"measuring {subject.model} under {len(missing)} hooks"):
            found = measure(subject, missing, sizes)
        known = found if known is None else known.with_more(found)
        if path is not None:
            known.save(path)
    assert known is not None
    return known


def _table(study: Study, model: str) -> Table:
    network, baseline = study.network, study.predictions[BASELINE]
    table = Table(
        title=f"{model}, {network.size} ranks at {format_rate(network.link.bits_per_second)}, "
        f"{format_duration(network.link.latency_seconds)}; predicted",
        caption="step: forward and backward. exposed: what communication adds. sent: by one rank.\n"
        "pays: at these rates of links it is faster than allreduce.\n"
        f"alone: the step without communication, {format_duration(study.alone_seconds)}.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("hook", overflow="fold")
    for column in ("step", "exposed", "speed-up", "of alone", "MB sent", "pays"):
        table.add_column(column, justify="right", no_wrap=True)
    for hook, prediction in study.predictions.items():
        table.add_row(
            hook,
            format_duration(prediction.step_seconds),
            format_duration(prediction.exposed_seconds),
            f"{baseline.step_seconds / prediction.step_seconds:.2f}",
            f"{study.alone_seconds / prediction.step_seconds:.0%}",
            f"{prediction.wire_bytes / 1e6:.1f}",
            "" if hook == BASELINE else str(study.pays(hook) or "never"),
        )
    return table


def _plot(study: Study, path: Path, model: str) -> None:
    from commhooks.lab.simulation.plot import plot_curves  # takes a second to import

    sizes = study.curve_sizes()
    try:
        plot_curves(
            path,
            sizes,
            {hook: study.curve(hook, sizes) for hook in study.hooks},
            alone_seconds=study.alone_seconds,
            title=f"{model} at {format_rate(study.network.link.bits_per_second)}, predicted",
            marked_size=study.network.size,
        )
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--plot {path}: {error}") from error
