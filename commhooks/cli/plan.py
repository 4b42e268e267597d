"""``commhooks plan``: choose a hook for each group of parameters, without training."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from commhooks.algorithms.adaptive.choices import DEFAULT_CANDIDATES, default_specs
from commhooks.algorithms.wrappers.table import check_candidate
from commhooks.cli.common import (
    FILE,
    IMAGE,
    Parsed,
    TargetCluster,
    cluster_options,
    draw,
    hooks_option,
    model_options,
    show_failures,
    usable_hooks,
    write_files,
)
from commhooks.errors import CommHookError
from commhooks.hook.spec import HookSpec, hook_spec
from commhooks.lab.planning import measure_groups
from commhooks.lab.simulation import BASELINE
from commhooks.lab.verdict import cost_of_measuring
from commhooks.planning import solve

_EXACT = ("@1d", "@embedding")


def _limit(text: str) -> float | HookSpec:
    """Read a number, or a hook whose error is the limit."""
    try:
        limit = float(text)
    except ValueError:
        try:
            return hook_spec(text)
        except CommHookError as error:
            raise ValueError(f"expected a number or a hook; {error}") from error
    if not 0 <= limit < float("inf"):
        raise ValueError(f"expected a number of at least 0, found {text}")
    return limit


@click.command()
@model_options
@click.option(
    "--error",
    type=Parsed("number|hook", _limit),
    default="int4",
    show_default=True,
    help="The largest relative error of a step's average: a number such as 0.02, or a hook whose "
    "error is the limit.",
)
@hooks_option(
    "Hooks to choose from, for example bf16,powersgd:rank=4. Plain averaging (allreduce) is always "
    f"added. Default: {', '.join(DEFAULT_CANDIDATES)}, and those that other packages declare.",
    name="--candidates",
    required=False,
)
@click.option(
    "--exact",
    default=",".join(_EXACT),
    show_default=True,
    help="Parameters that are averaged exactly: rules as those of the hook route, separated by "
    "commas. Empty: none.",
)
@cluster_options
@click.option("--save", type=FILE, help="Write the plan to this file.")
@click.option("--all-groups", is_flag=True, help="Show a row for each of several equal groups.")
@click.option("--plot", type=IMAGE, help="Draw the step before and after.")
def plan(
    model: str,
    input_factory: str | None,
    wrapper: Mapping[str, Any],
    error: float | HookSpec,
    candidates: Sequence[str],
    exact: str,
    cluster: TargetCluster,
    save: Path | None,
    all_groups: bool,
    plot: Path | None,
) -> None:
    """Choose a hook for each group of parameters, so that a step is short and its average close.

    The model and the candidates are measured on this machine first, which takes seconds to minutes.
    Nothing is trained, and no cluster is needed. docs/planning.md explains the method and its
    limits. Use a saved plan with commhooks.register(model, "auto", plan="plan.json"). A candidate
    that fails is left out, and a line says why; the exit status is then 1 if you have named it.
    """
    specs, reasons = usable_hooks(
        candidates or default_specs(),
        model,
        cluster.backend,
        BASELINE,
        check=lambda hook: check_candidate(hook, "candidates"),
    )
    if isinstance(error, HookSpec):
        check_candidate(error.create(), "--error")
    network = cluster.network
    job = cluster.job(model, input_factory, wrapper)
    texts = [spec.text for spec in specs]
    hooks = [*specs, error] if isinstance(error, HookSpec) and error.text not in texts else specs
    rules = [rule.strip() for rule in exact.split(",") if rule.strip()]
    start = time.monotonic()
    with Console(stderr=True).status(f"measuring {model} with {len(specs)} hooks"):
        measured = measure_groups(job, hooks, rules, cluster.world_size)
    measuring_seconds = time.monotonic() - start
    speed = cluster.speed_for(measured.alone_seconds)
    if isinstance(error, HookSpec) and error.text in measured.reasons:
        raise CommHookError(f"--error {error}: {measured.reasons[error.text]}")
    reasons |= measured.reasons
    problem = measured.problem(
        texts,
        network,
        cluster.costs(measured.gloo),
        cores=cluster.cores_of_rank,
        speed=speed,
        error=error if isinstance(error, float) else measured.error_of(error.text),
    )
    found = solve(problem)
    unwritten = write_files((save, found.save), (plot, draw("draw_steps", problem, found)))
    table = found.table(all_groups=all_groups)
    click.echo(f"{cluster.title(model, speed)}\n\n{table}\n\n{found.summary}")
    saved = found.before.exposed_seconds
    Console().print(cost_of_measuring(measuring_seconds, saved), highlight=False)
    show_failures(reasons, unwritten, is_error=bool(candidates))
