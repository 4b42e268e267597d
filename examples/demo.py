"""Train one GPT with three hooks, and show what each costs and when it pays.

    python examples/demo.py            (or: make demo)

Train the model of train_gpt.py on 2 ranks of this machine, once per hook. Print one table, which
ends in the time that the same training takes over slower links, and draw the validation loss
against the bytes sent. The trainings take turns, so that other work on the machine slows all of
them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from stdlib_text import load_corpus, train_batch
from torch import Tensor
from train_config import RunConfig, TrainConfig, make_parser, parse_args
from train_gpt import GPT, Trainer

from commhooks.cluster import Ranks
from commhooks.costs.network import Link, Network
from commhooks.lab.machine import cores
from commhooks.lab.simulation import Job, Study, measure

HOOKS: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "bf16"},
    {"name": "powersgd", "rank": 8},
]
PLAIN = "allreduce"
WORTH_IT = 0.9
"""The largest share of plain averaging's time that justifies a hook."""
LINKS = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
DEFAULTS = ["--steps", "200", "--warmup-steps", "30", "--evaluate-every", "25"]
DEFAULTS += ["--evaluate-batches", "4"]


@dataclass(frozen=True)
class Result:
    """A run with one hook: the validations, and the median time of a step on rank 0."""

    hook: str
    evaluations: list[dict[str, float]]
    step_seconds: float

    @property
    def last(self) -> dict[str, float]:
        """The validation after the last step."""
        return self.evaluations[-1]


# ------------------------------------------------------------------------- in the rank processes

_trainers: dict[str, Trainer] = {}


def begin(rank: int, config: TrainConfig, run: RunConfig) -> None:  # noqa: ARG001
    """Make a model for each hook."""
    for hook in HOOKS:
        _trainers[hook["name"]] = Trainer(replace(config, hook=hook), run, torch.device("cpu"))


def advance(rank: int, hook: str, steps: int) -> tuple[list[float], dict[str, float]]:  # noqa: ARG001
    """Train for some steps; return the seconds of each, and a validation."""
    trainer = _trainers[hook]
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - started)
    traffic = trainer.traffic()
    assert traffic.wire_bytes is not None
    evaluation = {"step": trainer.steps_done, "wire_bytes": traffic.wire_bytes}
    return seconds, {**evaluation, "loss": trainer.evaluate()}


def make_model() -> GPT:
    """Return the model to simulate. Rank processes have the command line of this program."""
    return GPT(options()[1].model)


def make_batch() -> tuple[Tensor, Tensor]:
    """Return a batch of the model to simulate."""
    config = options()[1]
    text = load_corpus().train
    return train_batch(text, config.batch_size, config.block_size, seed=0, step=0, rank=0)


# ------------------------------------------------------------------------------ in this process


def train(ranks: Ranks, config: TrainConfig, run: RunConfig, console: Console) -> list[Result]:
    """Train with each hook."""
    ranks(begin, config, run)
    names = [hook["name"] for hook in HOOKS]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    evaluations: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with Progress(console=console) as progress:
        tasks = {name: progress.add_task(name, total=config.steps) for name in names}
        for done in range(0, config.steps, run.evaluate_every):
            steps = min(run.evaluate_every, config.steps - done)
            for name, task in tasks.items():
                more, evaluation = ranks(advance, name, steps)[0]
                seconds[name] += more
                evaluations[name].append(evaluation)
                text = f"{name}: validation loss {evaluation['loss']:.3f}"
                progress.update(task, advance=steps, description=text)
    return [Result(name, evaluations[name], statistics.median(seconds[name])) for name in names]


def predict(ranks: Ranks, results: list[Result]) -> dict[str, list[float]]:
    """Predict the seconds of a step over each link: measured here, plus what the link adds."""
    job = Job("demo:make_model", "demo:make_batch", ranks_per_machine=ranks.world_size)
    measured = measure(job, HOOKS, [ranks.world_size], ranks)
    link = Link(max(LINKS.values()))
    study = Study(
        {hook["name"]: measured.of(hook) for hook in HOOKS},
        Network(ranks.world_size, link, link),
        measured.gloo,
        cores=max(1.0, cores() / ranks.world_size),
        loopback_seconds={result.hook: result.step_seconds for result in results},
    )
    return {
        name: [study.step_seconds(result.hook, rate) for result in results]
        for name, rate in LINKS.items()
    }


def make_table(results: list[Result], predicted: dict[str, list[float]]) -> Table:
    """Return one row per hook; ratios are against the first."""
    steps = results[0].last["step"]
    runs = {"here": [result.step_seconds for result in results], **predicted}
    table = Table(title="What each hook costs, and when it pays", caption_justify="left")
    table.caption = (
        f"Bytes: sent by one rank. Run: {steps:.0f} steps, without validation; over the links, "
        "with each rank on a machine of its own, predicted."
    )
    table.add_column("hook")
    # Line breaks, so that the table fits a terminal of 80 columns.
    for name in ("validation\nloss", "wire\nbytes", "ratio", *(f"run,\n{name}" for name in runs)):
        table.add_column(name, justify="right")
    for index, result in enumerate(results):
        table.add_row(
            result.hook,
            f"{result.last['loss']:.3f}",
            format_bytes(result.last["wire_bytes"]),
            f"{results[0].last['wire_bytes'] / result.last['wire_bytes']:.1f}x",
            *(f"{steps * seconds[index]:.1f} s" for seconds in runs.values()),
        )
    return table


def verdict(results: list[Result], predicted: dict[str, list[float]]) -> str:
    """Say for each link whether a hook is faster than plain averaging."""
    runs = {"this machine's loopback": [result.step_seconds for result in results], **predicted}
    lines = []
    for name, seconds in runs.items():
        fastest, best = min(zip(seconds, results, strict=True), key=lambda pair: pair[0])
        share = fastest / seconds[0]
        if share > WORTH_IT:
            lines.append(f"Over {name}, keep {PLAIN}: no hook here saves a tenth of the time.")
        else:
            lines.append(f"Over {name}, {best.hook} takes {share:.0%} of the time of {PLAIN}.")
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """Draw validation loss against bytes sent, one line per hook."""
    from matplotlib.figure import Figure  # takes a second to import, in each rank process
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for result, marker in zip(results, "osD", strict=False):
        sent = [evaluation["wire_bytes"] for evaluation in result.evaluations]
        loss = [evaluation["loss"] for evaluation in result.evaluations]
        axes.plot(sent, loss, marker=marker, markersize=4, linewidth=1.6, label=result.hook)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes sent per rank")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_title("Same model, same data, same steps: loss against bytes sent")
    axes.grid(alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="hook", framealpha=1)
    figure.savefig(path, dpi=160)


def format_bytes(count: float) -> str:
    """Return ``count`` with a decimal unit: 3337216 -> '3.34 MB'."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while float(f"{count:.3g}") >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


def options() -> tuple[argparse.Namespace, TrainConfig, RunConfig]:
    """Return the options of this program, and those of train_gpt.py."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT with three hooks; compare loss, bytes and time.",
        epilog="Other options go to train_gpt.py, for example --steps 50.",
    )
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="for the plot")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    args, more = parser.parse_known_args()
    return args, *parse_args(make_parser(), [*DEFAULTS, *more])


def main() -> None:
    """Run from the command line."""
    args, config, run = options()
    args.folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    console = Console()
    with Ranks(args.ranks) as ranks:
        results = train(ranks, config, run, console)
        with console.status("Predicting the same training over other links"):
            predicted = predict(ranks, results)
    plot = args.folder / "loss_vs_bytes.png"
    draw(results, plot)
    console.print()
    console.print(make_table(results, predicted))
    console.print(verdict(results, predicted), highlight=False)
    seconds = time.perf_counter() - started
    console.print(f"Plot: {plot}    Time: {seconds:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
