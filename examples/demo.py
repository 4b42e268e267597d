"""Train one GPT with three hooks, and show what each costs and saves.

    python examples/demo.py            (or: make demo)

Run train_gpt.py on 2 ranks of this machine, once per hook; print one table, and draw the validation
loss against the bytes sent.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.table import Table
from run_log import read_log

SCRIPT = Path(__file__).with_name("train_gpt.py")

# The runs differ only in what is sent.
HOOKS: dict[str, list[str]] = {
    "allreduce": [],
    "bf16": [],
    "powersgd": ["rank=8"],
}


@dataclass(frozen=True)
class Result:
    """The results in the log of one run; bytes and seconds are those of rank 0."""

    hook: str
    evaluations: list[dict[str, Any]]
    step_seconds: float  # median
    exposed_seconds: float  # mean per step

    @property
    def last(self) -> dict[str, Any]:
        """The validation after the last step."""
        return self.evaluations[-1]


def run_hook(hook: str, options: list[str], folder: Path, ranks: int, more: list[str]) -> Result:
    """Train with one hook and read the log back. Exit if training fails."""
    log_file = folder / f"{hook}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(SCRIPT), "--hook", hook]
    for option in options:
        command += ["--hook-option", option]
    command += ["--log-file", str(log_file), *more]
    # One thread per rank: the ranks share the cores of one machine.
    process = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if process.returncode != 0:
        sys.exit(f"demo: training with hook {hook!r} failed (exit status {process.returncode})")
    return read_result(hook, log_file)


def read_result(hook: str, log_file: Path) -> Result:
    """Return what the log of a run with ``hook`` says."""
    records = read_log(log_file)
    steps = [record for record in records if record["event"] == "step"]
    return Result(
        hook,
        [record for record in records if record["event"] == "evaluation"],
        statistics.median(record["seconds"] for record in steps),
        steps[-1]["exposed_seconds"] / steps[-1]["step"],
    )


def make_table(results: list[Result]) -> Table:
    """Return one row per hook; ratios are against the first."""
    plain = results[0].last["wire_bytes"]
    table = Table(title="What each hook costs and saves", caption_justify="left")
    table.caption = (
        "Bytes: per rank, whole run. Ratio: wire bytes of allreduce / wire bytes of the hook. "
        "Exposed: time per step that backward waits for communication."
    )
    table.add_column("hook")
    # Line breaks, so that the table fits a terminal of 80 columns.
    for name in ("validation\nloss", "gradient\nbytes", "wire\nbytes", "ratio", "step", "exposed"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.hook,
            f"{result.last['loss']:.3f}",
            format_bytes(result.last["gradient_bytes"]),
            format_bytes(result.last["wire_bytes"]),
            f"{plain / result.last['wire_bytes']:.1f}x",
            f"{result.step_seconds * 1e3:.1f} ms",
            f"{result.exposed_seconds * 1e3:.2f} ms",
        )
    return table


def draw(results: list[Result], path: Path) -> None:
    """Draw validation loss against bytes sent, one line per hook."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(7.2, 4.5), layout="constrained")
    for result, marker in zip(results, "osD", strict=False):
        sent = [record["wire_bytes"] for record in result.evaluations]
        loss = [record["loss"] for record in result.evaluations]
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
    plt.close(figure)


def format_bytes(count: float) -> str:
    """Return ``count`` with a decimal unit: 3337216 -> '3.34 MB'."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while float(f"{count:.3g}") >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT with three hooks; compare loss, bytes and time.",
        epilog="Other options go to train_gpt.py, for example --steps 50.",
    )
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="for logs and plot")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    args, more = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    more = ["--evaluate-every", "50", "--evaluate-batches", "8", *more]
    results = [
        run_hook(hook, options, args.folder, args.ranks, more) for hook, options in HOOKS.items()
    ]
    plot = args.folder / "loss_vs_bytes.png"
    draw(results, plot)
    console = Console()
    console.print()
    console.print(make_table(results))
    console.print(f"Plot: {plot}    Logs: {args.folder}/*.jsonl    ", end="", highlight=False)
    console.print(f"Time: {time.perf_counter() - started:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
