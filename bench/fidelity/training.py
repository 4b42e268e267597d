"""One training on every rank, and all that a file of results lacks."""

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

import commhooks
from bench.fidelity.runs import Record
from bench.fidelity.tasks import ALL_TASKS, Batch, Task
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook
from bench.files import Results
from commhooks.testing import run_ranks

_WARM_UP = 0.1  # of all steps
_TIMEOUT = 3600.0  # seconds; a run takes 15 on an idle machine


def train(rank: int, size: int, task: str, trained: TrainedHook, seed: int) -> dict[str, float]:
    """Train on one rank. Return the ``loss`` of its model on its share of the validation data.

    The seed determines the initial parameters and the data, for every hook. Each rank validates its
    own model because models differ under hooks without consensus; for all others, the mean over
    ranks is the model's loss. ``wire_bytes``: sent by the rank in all steps.
    """
    chosen = ALL_TASKS[task]
    data = chosen.make_data()
    torch.manual_seed(seed)
    model = commhooks.DistributedDataParallel(data.model())
    handle = commhooks.register(model, trained.create())
    batches = (data.batch(seed, step, rank) for step in range(chosen.steps))
    fit(model, chosen, trained.recipe or chosen.usual, batches)
    handle.adapter.drain()
    sent = handle.stats().total.wire_bytes
    validation = data.validation(rank, size)
    with torch.no_grad():
        loss = model.module(*validation).item()
    return {"loss": loss, "wire_bytes": math.nan if sent is None else sent * chosen.steps}


def fit(model: nn.Module, task: Task, recipe: str, batches: Iterable[Batch]) -> None:
    """Train a model whose gradients are averaged, with a linear warm-up and a cosine to zero."""

    def rate(step: int) -> float:
        warm_up = min(1.0, (step + 1) / (_WARM_UP * task.steps))
        return warm_up * (1 + math.cos(math.pi * step / task.steps)) / 2

    for _ in task.recipes[recipe].train(model, batches, rate):
        pass


def run_missing(task: str, chosen: Sequence[TrainedHook], seed: int, results: Results) -> None:
    """Train with the hooks, their references and controls where ``results`` has no such run."""
    recipes = dict.fromkeys(trained.reference_recipe for trained in chosen)
    references = (TrainedHook(REFERENCE, recipe) for recipe in recipes)
    controls = [trained.control for trained in chosen if trained.control is not None]
    record = Record(results.document)
    for trained in (*references, *chosen, *controls):
        if all(run.seed != seed for run in record.runs(task, trained)):
            run = {"task": task, "seed": seed, **trained.key(ALL_TASKS[task].usual)}
            results.once(run, partial(_measure, task, trained, seed))


def _measure(task: str, trained: TrainedHook, seed: int) -> dict[str, float]:
    """Return the means over ranks."""
    found = run_ranks(train, trained.ranks, task, trained, seed, timeout=_TIMEOUT)
    return {name: statistics.mean(of_rank[name] for of_rank in found) for name in found[0]}
