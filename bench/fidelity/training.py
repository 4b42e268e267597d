"""One training on every rank, and all that a record lacks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import commhooks
from bench.fidelity.runs import Record, Run
from bench.fidelity.tasks import ALL_TASKS, Batch, Recipe
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook
from commhooks.testing import run_ranks

_WARM_UP = 0.1  # of all steps
_TIMEOUT = 3600.0  # seconds; a run takes 15 on an idle machine


@dataclass(frozen=True)
class TrainingResult:
    """The result of one rank: the ``loss`` of its model on its share of the validation data.

    ``wire_bytes``: sent by the rank in all steps. Each rank validates its own model because models
    differ under hooks without consensus; for all others, the mean over ranks is the model's loss.
    """

    loss: float
    wire_bytes: float


def train(rank: int, size: int, task: str, trained: TrainedHook, seed: int) -> TrainingResult:
    """Train on one rank.

    The seed determines the initial parameters and the data, for every hook.
    """
    chosen = ALL_TASKS[task]
    data = chosen.make_data()
    torch.manual_seed(seed)
    model = commhooks.DistributedDataParallel(data.model())
    handle = commhooks.register(model, trained.create())
    recipe = chosen.recipes[trained.recipe or chosen.usual]
    fit(model, recipe, chosen.steps, lambda step: data.batch(seed, step, rank))
    handle.adapter.flush()
    sent = handle.stats().total.wire_bytes
    validation = data.validation(rank, size)
    with torch.no_grad():
        loss = model.module(*validation).item()
    return TrainingResult(loss, math.nan if sent is None else sent * chosen.steps)


def fit(model: nn.Module, recipe: Recipe, steps: int, batch: Callable[[int], Batch]) -> None:
    """Train a model whose gradients are averaged on ``batch(step)``."""
    optimizers = recipe.optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
        for optimizer in optimizers
    ]
    for step in range(steps):
        model.zero_grad()
        model(*batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


def _rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine to zero."""
    return min(1.0, (step + 1) / (_WARM_UP * steps)) * (1 + math.cos(math.pi * step / steps)) / 2


def run_missing(
    task: str,
    chosen: Sequence[TrainedHook],
    seed: int,
    record: Record,
    path: Path,
    *,
    again: bool = False,
) -> None:
    """Train with the hooks, their references and controls where ``record`` has no such run.

    Each run is saved when it ends.

    ``again``: repeat the runs that it has, except those of references.
    """
    usual = ALL_TASKS[task].usual
    recipes = dict.fromkeys(trained.reference_recipe or usual for trained in chosen)
    references = (TrainedHook(REFERENCE, recipe=recipe) for recipe in recipes)
    controls = [trained.control for trained in chosen if trained.control is not None]
    for trained in (*references, *chosen, *controls):
        config, recipe = trained.create().to_config(), trained.recipe or usual
        runs = record.runs(task, trained.hook, config, recipe, trained.ranks)
        known = {run.seed for run in runs}
        if seed in known and not (again and trained.hook != REFERENCE):
            continue
        start = time.perf_counter()
        results = run_ranks(train, trained.ranks, task, trained, seed, timeout=_TIMEOUT)
        loss = statistics.mean(result.loss for result in results)
        wire_bytes = statistics.mean(result.wire_bytes for result in results)
        run = Run(task, trained.hook, config, recipe, seed, loss, wire_bytes, trained.ranks)
        record.add(run)
        record.save(path)
        print(
            f"{task} {trained.hook} ({recipe}) on {trained.ranks} ranks, seed {seed}: validation "
            f"loss {loss:.4f} after {time.perf_counter() - start:.0f} s",
            flush=True,
        )
