"""``commhooks compare``: measure hooks on a model, over links."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from json import dumps
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from commhooks.cli.commands import INTERRUPTED
from commhooks.cli.common import (
    DEVICE,
    FILE,
    IMAGE,
    RATE,
    draw,
    hooks_option,
    model_options,
    show_failures,
    write_files,
)
from commhooks.cluster import Device, LaunchedRanks
from commhooks.lab.comparison import Comparison, ComparisonInterrupted
from commhooks.lab.comparison import compare as compare_hooks
from commhooks.lab.comparison.experiment import ProgressCallback

_COUNT = click.IntRange(min=1)


@click.command()
@model_options
@click.option(
    "--train",
    metavar="NAME",
    help="Also train with each hook. package.module:function or file.py:function, a generator "
    "function train(model, rank, world_size) that runs one training step per next() and yields a "
    "function that returns the validation loss.",
)
@hooks_option(
    "Hooks with their options, for example int8,powersgd:rank=4 or my_module:MyHook. A hook in a "
    "hook is written in parentheses: error_feedback:inner=(topk:density=0.01). bf16 is always "
    "added."
)
@click.option("--device", **DEVICE)
@click.option("--world-size", type=click.IntRange(min=2), help="Number of ranks; 2 by default.")
@click.option(
    "--link",
    "links",
    type=RATE,
    multiple=True,
    help="Rate of a link between ranks, for example 1gbit; may be given several times. As root, "
    "such a link is set up and measured; otherwise its times are predicted.",
)
@click.option("--predict", is_flag=True, help="Predict links even if they could be measured.")
@click.option("--steps", type=_COUNT, default=50, show_default=True, help="Timed steps per hook.")
@click.option("--train-steps", type=_COUNT, default=200, show_default=True, help="Steps to train.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for the steps of one hook, at most 53 at a time; then the hook has failed.",
)
@click.option("--json", type=FILE, help="Write all figures to this file.")
@click.option("--csv", type=FILE, help="Write a table to this file, one line per hook and link.")
@click.option("--plot", type=IMAGE, help="Draw step times and training losses.")
@click.option("--html", type=FILE, help="Write one page with all tables and plots to this file.")
def compare(
    input_factory: str | None,
    device: Device,
    world_size: int | None,
    links: tuple[float, ...],
    predict: bool,
    json: Path | None,
    csv: Path | None,
    plot: Path | None,
    html: Path | None,
    timeout: float,
    **options: Any,
) -> None:
    """Measure hooks on a model, beside torch DDP and the bare model.

    Ranks are processes on this machine. The first line says on which device they computed, the last
    lines which hook to use. Each hook is verified before it is timed. Ctrl-C prints what has been
    measured so far.

    A hook that fails is left out, and a line says why; the others are measured. The exit status is
    0 if no hook failed, 1 if some did or nothing could be measured, 2 for wrong options, and 130
    after Ctrl-C.

    With `torchrun ... -m commhooks compare ...` the ranks are those that torchrun starts, and the
    network between their hosts is measured and used.
    """
    launched = dist.is_torchelastic_launched()
    if launched and (links or world_size is not None):
        raise click.UsageError(
            "--world-size and --link are for ranks on this machine; torchrun has started the "
            "ranks, and their own network is measured"
        )
    with LaunchedRanks(device, timeout) if launched else nullcontext() as ranks:
        is_first = ranks is None or ranks.rank == 0
        status = 0
        try:
            with _progress_bar() if is_first else nullcontext(lambda *_: None) as progress:
                comparison = compare_hooks(
                    **options,
                    input=input_factory,
                    device=device,
                    world_size=world_size or 2,
                    links=links,
                    measure_links=not predict,
                    timeout=timeout,
                    ranks=ranks,
                    progress=progress,
                )
        except ComparisonInterrupted as interrupt:
            comparison, status = interrupt.comparison, INTERRUPTED
            if launched:  # torchrun passes Ctrl-C on, after the terminal may have sent it
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_first:
            unwritten = write_files(
                (json, lambda path: path.write_text(dumps(comparison.to_dict(), indent=1) + "\n")),
                (csv, lambda path: path.write_text(comparison.to_csv())),
                (plot, draw("draw_comparison", comparison)),
                (html, lambda path: path.write_text(_page(comparison))),
            )
            console = Console()
            for line in str(comparison).splitlines():
                is_whole = line.startswith("Failed: ")  # one line in a pipe
                console.print(line, soft_wrap=is_whole, highlight=False, markup=False)
            show_failures({}, unwritten)
    sys.exit(status or int(bool(comparison.failures)))


def _page(comparison: Comparison) -> str:
    from commhooks.cli.page import comparison_page  # takes a second to import

    return comparison_page(comparison)


@contextmanager
def _progress_bar() -> Iterator[ProgressCallback]:
    """Show a bar on the standard error output, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )
