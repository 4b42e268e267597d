"""Torch's hooks over Gloo beside those of this package: ``python -m bench.torch_hooks RESULT.json``

First each hook of torch is tried several times on a model of several buckets and of one, in
processes of its own, with a time limit. Then those that completed, and ours, train the GPT of
bench.slow_link in turn, one step each, in the same processes: other load on the machine affects all
alike. A file that has the trials gets new trainings.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)

from bench import files, slow_link
from bench.measured_hooks import TorchStyleHook, entry_of, torch_powersgd
from commhooks.lab.comparison.entry import Entry
from commhooks.lab.machine import describe_machine
from commhooks.testing import close_ranks, run_ranks

RANKS = 2
BUCKETS = {"several": {"bucket_cap_mb": 4}, "one": {"bucket_cap_mb": 1000}}
TRIALS = 5
TRIAL_STEPS = 20
TIME_LIMIT = 60.0  # seconds of a trial, which takes one if it succeeds

_FUNCTIONS: dict[Callable[[], Any], tuple[Callable[..., Any], ...]] = {
    NoneType: (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
    ),
    torch_powersgd: (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook),
    partial(getattr, dist.group, "WORLD"): (
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
    ),
}
"""Torch's hooks, by the function that makes their state."""
TORCH: dict[str, Entry] = {
    function.__name__: TorchStyleHook(function.__name__, function=function, make_state=make_state)
    for make_state, functions in _FUNCTIONS.items()
    for function in functions
}
OURS = {
    spec.partition(":")[0]: entry_of(spec)
    for spec in (
        *("allreduce", "fp16", "bf16"),
        *("powersgd:rank=4,start_step=2", "batched_powersgd:rank=4,start_step=2"),
    )
}


def wrap(net: nn.Module, hook: str, **options: Any) -> nn.Module:
    """Wrap a model for a hook of torch's or ours."""
    return (TORCH | OURS)[hook].wrap(net, **options)[0]


def try_hook(rank: int, size: int, hook: str, options: dict[str, Any]) -> None:
    """Train 16 layers, 17 MB, for some steps."""
    model = wrap(nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))), hook, **options)
    inputs = torch.randn(16, 512, generator=torch.Generator().manual_seed(rank))
    for _ in range(TRIAL_STEPS):
        model.zero_grad()
        model(inputs).square().mean().backward()


def outcomes(hook: str, options: dict[str, Any]) -> dict[str, int]:
    """Return how trials ended, and how often."""
    found: Counter[str] = Counter()
    for _ in range(TRIALS):
        try:
            run_ranks(try_hook, RANKS, hook, options, timeout=TIME_LIMIT)
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


def train(
    rank: int, size: int, hooks: dict[str, dict[str, Any]], steps: int
) -> dict[str, tuple[list[float], float]]:
    """Train all models in turn; return the seconds of each step and the last validation loss."""
    trainings, validations = {}, {}
    for hook, options in hooks.items():
        torch.manual_seed(0)
        trainings[hook] = slow_link.train(wrap(slow_link.make_gpt(), hook, **options), rank, size)
    seconds: dict[str, list[float]] = {hook: [] for hook in hooks}
    for _ in range(steps):
        for hook, steps_of_model in trainings.items():
            dist.barrier()
            start = time.perf_counter()
            validations[hook] = next(steps_of_model)
            seconds[hook].append(time.perf_counter() - start)
    with torch.no_grad():
        return {hook: (seconds[hook], validate()) for hook, validate in validations.items()}


def main() -> None:
    """Try, train, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    tried = files.load(arguments.result, {}).get("tried") or {
        hook: {count: outcomes(hook, options) for count, options in BUCKETS.items()}
        for hook in TORCH
    }
    hooks: dict[str, dict[str, Any]] = {}
    for hook, found in tried.items():
        for count, options in BUCKETS.items():
            if found[count].keys() == {"completed"}:
                hooks.setdefault(hook, {} if count == "several" else options)
    hooks |= {hook: {} for hook in OURS}
    load = os.getloadavg()[0]
    results = run_ranks(train, RANKS, hooks, arguments.steps, timeout=3600.0)
    close_ranks()
    rows = [
        {
            "hook": hook,
            "buckets": "one" if options else "of 25 MiB",
            "step_seconds": statistics.median(
                max(times) for times in zip(*(of_rank[hook][0] for of_rank in results), strict=True)
            ),
            "validation_loss": statistics.mean(of_rank[hook][1] for of_rank in results),
        }
        for hook, options in hooks.items()
    ]
    about = {"ranks": RANKS, "steps": arguments.steps, "load": [load, os.getloadavg()[0]]}
    document = {"about": about | describe_machine(), "rows": rows, "tried": tried}
    files.save(arguments.result, document)


if __name__ == "__main__":
    main()
