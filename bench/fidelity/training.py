"""One training on every rank, and all that a file of results lacks."""

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from bench.fidelity.runs import Record
from bench.fidelity.tasks import ALL_TASKS, Batch, Task
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook
from bench.files import Results
from commhooks.cluster import Ranks
from commhooks.cluster.links import shaped_link
from commhooks.testing import run_ranks

_WARM_UP = 0.1  # of all steps
_TIMEOUT = 4 * 3600.0  # seconds; a run takes minutes on an idle machine, an hour over a slow link


def train(
    rank: int, size: int, task: str, trained: TrainedHook, seed: int, host_memory: bool = True
) -> dict[str, Any]:
    """Train on one rank. Return the ``loss`` of its model on its share of the validation data.

    The seed determines the initial parameters and the data, for every hook. Each rank validates its
    own model because models differ under hooks without consensus; for all others, the mean over
    ranks is the model's loss. ``wire_bytes``: sent by the rank in all steps. ``seconds``: of all
    steps, without validation. ``curve``: the loss after every ``stride`` steps of the task, and the
    seconds until then.
    """
    chosen = ALL_TASKS[task]
    data = chosen.make_data()
    torch.manual_seed(seed)
    model = commhooks.DistributedDataParallel(data.model(), host_memory=host_memory)
    handle = commhooks.register(model, trained.create())
    batches = (data.batch(seed, step, rank) for step in range(chosen.steps))
    validation = data.validation(rank, size)
    curve, seconds = [], 0.0

    def validate() -> float:
        with torch.no_grad():
            return float(model.module(*validation))

    start = time.perf_counter()
    for step, _ in enumerate(fit(model, chosen, trained.recipe or chosen.usual, batches), 1):
        if chosen.stride and step % chosen.stride == 0 and step < chosen.steps:
            seconds += time.perf_counter() - start
            curve.append((step, seconds, validate()))
            dist.barrier()  # or the next step would wait for the slowest validation
            start = time.perf_counter()
    handle.adapter.drain()
    seconds += time.perf_counter() - start
    sent = handle.stats().total.wire_bytes
    found: dict[str, Any] = {"loss": validate(), "seconds": seconds}
    if chosen.stride:
        found["curve"] = [*curve, (chosen.steps, seconds, found["loss"])]
    return found | {"wire_bytes": math.nan if sent is None else sent * chosen.steps}


def fit(model: nn.Module, task: Task, recipe: str, batches: Iterable[Batch]) -> Iterator[None]:
    """Train a model whose gradients are averaged, with a linear warm-up and a cosine to zero.

    Yields after each step.
    """

    def rate(step: int) -> float:
        warm_up = min(1.0, (step + 1) / (_WARM_UP * task.steps))
        return warm_up * (1 + math.cos(math.pi * step / task.steps)) / 2

    return task.recipes[recipe].train(model, batches, rate)


def run_missing(task: str, chosen: Sequence[TrainedHook], seed: int, results: Results) -> None:
    """Train with the hooks, their references and controls where ``results`` has no such run."""
    recipes = dict.fromkeys(trained.reference_recipe for trained in chosen)
    references = (TrainedHook(REFERENCE, recipe) for recipe in recipes)
    controls = [trained.control for trained in chosen if trained.control is not None]
    for trained in (*references, *chosen, *controls):
        _run_if_missing(task, trained, seed, results)


def run_over_link(
    task: str, chosen: Sequence[TrainedHook], seed: int, results: Results, rate: float
) -> None:
    """Train with the hooks, on hosts with links of ``rate`` bits per second. Needs root."""
    for trained in chosen:
        _run_if_missing(task, trained, seed, results, rate)


def _run_if_missing(
    task: str, trained: TrainedHook, seed: int, results: Results, rate: float | None = None
) -> None:
    if all(run.seed != seed for run in Record(results.document).runs(task, trained, rate)):
        run = {"task": task, "seed": seed, **trained.key(ALL_TASKS[task].usual)}
        run["bits_per_second"] = rate
        results.once(run, partial(_measure, task, trained, seed, rate))


def _measure(task: str, trained: TrainedHook, seed: int, rate: float | None) -> dict[str, Any]:
    """Return the means over ranks."""
    size = trained.ranks
    if rate is None:
        found = run_ranks(train, size, task, trained, seed, timeout=_TIMEOUT)
    else:
        with shaped_link(size, rate) as link, Ranks(size, link, timeout=_TIMEOUT) as ranks:
            found = ranks(train, size, task, trained, seed, host_memory=False)
    return {name: _mean([of_rank[name] for of_rank in found]) for name in found[0]}


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of lists element by element."""
    if isinstance(values[0], Sequence):
        return [_mean(each) for each in zip(*values, strict=True)]
    return statistics.mean(values)
