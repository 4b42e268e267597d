"""Measure what training loses if FSDP2 sends fewer bits: ``python -m bench.fidelity.sharded FILE``

Train the task's model, sharded over the ranks, for each seed with each of ``SETTINGS``, on the same
data, and add each run to FILE, which keeps what it has. Prints the mean loss of each setting beside
torch's. All is in float32, so that nothing else rounds.
"""

import argparse
import itertools
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.fidelity.tasks import ALL_TASKS
from bench.fidelity.trained_hooks import RANKS
from bench.fidelity.training import fit
from bench.files import Results
from bench.tables import table
from commhooks.hook.spec import hook_spec
from commhooks.integrations.fsdp import (
    QuantizedCollective,
    quantize_all_gather,
    quantize_reduce_scatter,
)
from commhooks.testing import close_ranks, run_ranks

TORCH = ""
DIFFERENCES = "differences in "
SETTINGS = [
    (TORCH, TORCH),
    (TORCH, "int8"),
    ("int8", "int8"),
    (TORCH, "fp8"),
    (TORCH, "int4"),
    (TORCH, "int4:rotate=true,block_size=32"),
    (TORCH, DIFFERENCES + "int4"),
    ("int8", DIFFERENCES + "int4"),
    ("int8", TORCH),
]
"""Numbers of the reduce-scatter and of the all-gather, as hooks on the command line."""
KEYS = ("task", "seed", "reduce_scatter", "all_gather")


def train(
    rank: int, size: int, task: str, seed: int, reduces: str, gathers: str
) -> dict[str, float]:
    """Return the validation loss with rounded and with exact parameters, and what was sent."""
    chosen = ALL_TASKS[task]
    data = chosen.make_data()
    torch.manual_seed(seed)
    model: Any = data.model()
    mesh = init_device_mesh("cpu", (size,))
    reshards = False if gathers.startswith(DIFFERENCES) else None
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    quantized = quantize(model, reduces, gathers)
    batches = (data.batch(seed, step, rank) for step in range(chosen.steps))
    for _ in fit(model, chosen, chosen.usual, batches):
        pass
    saved = sum(each.plain_bytes - each.wire_bytes for each in quantized)
    loss = _validate(model, data.validation(rank, size))
    for each in quantized:
        each.remove()
    exact = _validate(model, data.validation(rank, size))
    return {"loss": loss, "loss_of_exact_parameters": exact, "saved_bytes": saved}


def quantize(model: nn.Module, reduces: str, gathers: str) -> list[QuantizedCollective]:
    """Quantize the collectives of a sharded model as a setting says."""
    quantized = []
    if reduces:
        quantized.append(quantize_reduce_scatter(model, hook_spec(reduces).config))
    if gathers:
        numbers = hook_spec(gathers.removeprefix(DIFFERENCES)).config
        differs = gathers.startswith(DIFFERENCES)
        quantized.append(quantize_all_gather(model, numbers, differences=differs))
    return quantized


def _validate(model: nn.Module, batch: Any) -> float:
    model.reshard()  # type: ignore[operator]
    with torch.no_grad():
        loss: torch.Tensor = model(*batch) / dist.get_world_size()
    dist.all_reduce(loss)
    return loss.item()


def measure(run: dict[str, Any]) -> Any:
    """Train with the settings ``run``, and return what rank 0 found."""
    return run_ranks(train, RANKS, *run.values(), timeout=3600)[0]


def main() -> None:
    """Train what the file lacks, and print a table of all it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--task", choices=ALL_TASKS, default="gpt")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    results = Results(arguments.path, "machine")
    for seed, setting in itertools.product(range(arguments.seeds), SETTINGS):
        run = dict(zip(KEYS, (arguments.task, seed, *setting), strict=True))
        results.once(run, partial(measure, run))
    close_ranks()
    print(table(_rows([run for run in results.runs if run["task"] == arguments.task])))


def _rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean losses of each setting, and the changes against torch by seed."""
    plain = {run["seed"]: run for run in runs if not run["reduce_scatter"] + run["all_gather"]}
    rows = []
    for setting in SETTINGS:
        own = [run for run in runs if (run["reduce_scatter"], run["all_gather"]) == setting]
        row: dict[str, Any] = dict(zip(("reduce-scatter", "all-gather"), setting, strict=True))
        for name in ("loss", "loss_of_exact_parameters") if own else ():
            changes = [run[name] / plain[run["seed"]][name] - 1 for run in own]
            row[name] = statistics.fmean(run[name] for run in own)
            row[f"change of {name}"] = ", ".join(f"{change:+.2%}" for change in changes)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
