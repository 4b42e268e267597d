"""``commhooks compare``: measure hooks on a model, over links."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from commhooks.cli.comparison_table import costs_table, times_table
from commhooks.cli.parameters import FILE, IMAGE, RATE, hooks_option, input_option, model_option
from commhooks.hook.spec import HookSpec
from commhooks.lab.comparison import Comparison
from commhooks.lab.comparison import compare as compare_hooks
from commhooks.lab.comparison.setting import ProgressCallback

__all__ = ["compare"]


@click.command()
@model_option
@input_option
@click.option(
    "--train",
    metavar="NAME",
    help="Also train with each hook. package.module:function, a generator function "
    "train(model, rank, world_size) that runs one training step per next() and yields a function "
    "that returns the validation loss.",
)
@hooks_option(
    "Hooks with their options, for example bf16,powersgd:rank=4. A hook in a hook is written in "
    "parentheses: error_feedback:inner=(topk:density=0.01)."
)
@click.option("--world-size", default=2, show_default=True, help="Number of ranks.")
@click.option(
    "--link",
    "links",
    type=RATE,
    multiple=True,
    help="Rate of a link between ranks, for example 1gbit; may be given several times. As root, "
    "such a link is set up and measured; otherwise its times are predicted.",
)
@click.option("--predict", is_flag=True, help="Predict links even if they could be measured.")
@click.option("--steps", default=50, show_default=True, help="Timed steps per hook and link.")
@click.option("--train-steps", default=200, show_default=True, help="Training steps per hook.")
@click.option("--json", "json_file", type=FILE, help="Write all figures to this file.")
@click.option(
    "--csv", "csv_file", type=FILE, help="Write a table to this file, one line per hook and link."
)
@click.option("--plot", "plot_file", type=IMAGE, help="Draw step times and training losses.")
def compare(
    model: str,
    input_factory: str | None,
    train: str | None,
    hooks: list[HookSpec],
    world_size: int,
    links: tuple[float, ...],
    predict: bool,
    steps: int,
    train_steps: int,
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure hooks on a model, beside torch DDP and the bare model.

    Ranks are processes on this machine, on CPU. Each hook is verified before it is timed.
    """
    console = Console(stderr=True)
    with _bar(console) as progress:
        comparison = compare_hooks(
            model,
            hooks,
            input=input_factory,
            train=train,
            world_size=world_size,
            links=links,
            steps=steps,
            train_steps=train_steps,
            measure_links=not predict,
            progress=progress,
        )
    if json_file is not None:
        json_file.write_text(json.dumps(comparison.to_dict(), indent=1) + "\n")
    if csv_file is not None:
        csv_file.write_text(comparison.to_csv())
    if plot_file is not None:
        from commhooks.cli.comparison_plot import draw_comparison

        draw_comparison(comparison, plot_file)
    _show(comparison)


@contextmanager
def _bar(console: Console) -> Iterator[ProgressCallback]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update


def _show(comparison: Comparison) -> None:
    console = Console()
    console.print(times_table(comparison))
    console.print(costs_table(comparison))
    for note in comparison.notes:
        console.print(f"Note: {note}.", highlight=False, markup=False)
