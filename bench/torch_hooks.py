"""Torch's hooks over Gloo beside those of this package: ``python -m bench.torch_hooks RESULT.json``

First each hook of torch is tried several times on a model of several buckets and of one, in
processes of its own, with a time limit. Then those that completed, and ours, train the large GPT of
bench.models in turn, one step each, in the same processes: other load on the machine affects all
alike. A file that has the trials gets new trainings.
"""

import argparse
import functools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bench import files, models
from bench.measured_hooks import TORCHS, TorchStyleHook, entry_of, name_of
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.comparison.rank_side import TrainingRun
from commhooks.lab.machine import describe_machine
from commhooks.lab.models import Workload
from commhooks.testing import close_ranks, run_ranks

RANKS = 2
BUCKET_MB = {"several": 4, "one": 1000}
TRIALS = 5
TRIAL_STEPS = 20
TIME_LIMIT = 60.0  # seconds of a trial, which takes one if it succeeds

THEIRS = {hook.function.__name__: hook for hook in TORCHS.values() if hook.name != "torch noop"}
OURS = ["allreduce", "fp16", "bf16"]
OURS += ["powersgd:rank=4,start_step=2", "batched_powersgd:rank=4,start_step=2"]


def in_buckets(hook: TorchStyleHook, megabytes: float) -> TorchStyleHook:
    """Return the hook with buckets of this size."""
    return replace(hook, kind=functools.partial(TorchDDP, bucket_cap_mb=megabytes))


def try_hook(rank: int, size: int, hook: TorchStyleHook) -> None:
    """Train 16 layers, 17 MB, for some steps."""
    model, _ = hook.wrap(nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))))
    inputs = torch.randn(16, 512, generator=torch.Generator().manual_seed(rank))
    for _ in range(TRIAL_STEPS):
        model.zero_grad()
        model(inputs).square().mean().backward()


def outcomes(hook: TorchStyleHook) -> dict[str, int]:
    """Return how trials ended, and how often."""
    found: Counter[str] = Counter()
    for _ in range(TRIALS):
        try:
            run_ranks(try_hook, RANKS, hook, timeout=TIME_LIMIT)
        except Exception as error:
            found[first_sentence(error)] += 1
        else:
            found["completed"] += 1
        close_ranks()
    return dict(found)


def first_sentence(error: Exception) -> str:
    """Return the error that a callback had, without the advice that follows."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return text.rpartition("callback: ")[2].partition(". ")[0].strip(": ")


def train(rank: int, size: int, hooks: tuple[Entry, ...], steps: int) -> list[list[float]]:
    """Train all models in turn; return the median step of each, and each last validation loss."""
    workload = Workload(models.large_gpt)
    runs = [TrainingRun(hook, workload, "bench.models:train", rank) for hook in hooks]
    seconds = torch.tensor([[run.step() for run in runs] for _ in range(steps)])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # of the slowest rank
    losses = [run.validate().validation_loss for run in runs]
    return [seconds.quantile(0.5, dim=0).tolist(), losses]


def main() -> None:
    """Try, train, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    tried = files.load(arguments.result, {}).get("tried") or {
        name: {count: outcomes(in_buckets(hook, mb)) for count, mb in BUCKET_MB.items()}
        for name, hook in THEIRS.items()
    }
    hooks = {name_of(spec): (entry_of(spec), "of 25 MiB") for spec in OURS}
    for name, found in tried.items():
        if found["several"].keys() == {"completed"}:
            hooks[name] = THEIRS[name], "of 25 MiB"
        elif found["one"].keys() == {"completed"}:
            hooks[name] = in_buckets(THEIRS[name], BUCKET_MB["one"]), "one"
    entries, buckets = zip(*hooks.values(), strict=True)
    load = os.getloadavg()[0]
    found, _ = run_ranks(train, RANKS, entries, arguments.steps, timeout=3600.0)
    close_ranks()
    rows = [
        {"hook": name, "buckets": size, "step_seconds": step, "validation_loss": loss}
        for name, size, step, loss in zip(hooks, buckets, *found, strict=True)
    ]
    about = {"ranks": RANKS, "steps": arguments.steps, "load": [load, os.getloadavg()[0]]}
    document = {"about": about | describe_machine(), "rows": rows, "tried": tried}
    files.save(arguments.result, document)


if __name__ == "__main__":
    main()
