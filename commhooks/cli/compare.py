"""``commhooks compare``: which hook pays, on this model, over these links."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from commhooks.cli.comparison_table import costs_table, times_table
from commhooks.cli.parameters import FILE, IMAGE, RATE, hooks_option
from commhooks.hook.spec import HookSpec
from commhooks.lab.comparison import Comparison
from commhooks.lab.comparison import compare as compare_hooks
from commhooks.lab.comparison.setting import Progress as Report
from commhooks.lab.models import built_in_models

__all__ = ["compare"]


@click.command()
@click.option(
    "--model",
    required=True,
    metavar="NAME",
    help=f"package.module:factory, or one of {', '.join(built_in_models())}.",
)
@click.option(
    "--input",
    "input_factory",
    metavar="NAME",
    help="package.module:factory of a batch; default: the model's example_input().",
)
@click.option(
    "--train",
    metavar="NAME",
    help="package.module:function, a generator function train(model, rank, world_size) that takes "
    "a training step each time, and yields a function for the loss on validation data.",
)
@hooks_option(
    "For example allreduce,bf16,powersgd:rank=4,error_feedback:inner=(topk:density=0.01)."
)
@click.option("--world-size", default=2, show_default=True, help="Ranks on this machine.")
@click.option(
    "--link",
    "links",
    type=RATE,
    multiple=True,
    help="Rate of a link between ranks, such as 1gbit; may be given several times. As root it is "
    "a real one, else it is predicted.",
)
@click.option("--predict", is_flag=True, help="Predict links even if they could be measured.")
@click.option("--steps", default=50, show_default=True, help="That are timed, per hook and link.")
@click.option("--train-steps", default=200, show_default=True, help="With --train, per hook.")
@click.option(
    "--json",
    "json_file",
    type=FILE,
    help="Write all figures to this file.",
)
@click.option(
    "--csv",
    "csv_file",
    type=FILE,
    help="Likewise, one line per hook and link.",
)
@click.option(
    "--plot",
    "plot_file",
    type=IMAGE,
    help="Draw time by hook and link, and losses.",
)
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
    """Measure hooks side by side on a model, with torch's own averaging beside them.

    Each hook is verified before it is timed. Ranks are processes on this machine, on CPU.
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
def _bar(console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def report(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield report


def _show(comparison: Comparison) -> None:
    console = Console()
    console.print(times_table(comparison))
    console.print(costs_table(comparison))
    for note in comparison.notes:
        console.print(f"Note: {note}.", highlight=False, markup=False)
