"""One training, on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

import commhooks
from bench.fidelity.tasks import ALL_TASKS
from bench.fidelity.trained_hooks import TrainedHook

__all__ = ["RANKS", "TrainingResult", "train"]

RANKS = 4
_WARM_UP = 0.1  # of all steps


@dataclass(frozen=True)
class TrainingResult:
    """The result of one rank: ``loss`` and ``accuracy`` of its model on its share of the validation
    data.

    ``wire_bytes``: sent by the rank in all steps. Each rank validates its own model because models
    differ under hooks without consensus; for all others, the mean over ranks is the model's loss.
    """

    loss: float
    accuracy: float | None
    wire_bytes: float


def train(rank: int, size: int, task: str, trained: TrainedHook, seed: int) -> TrainingResult:
    """Train on one rank.

    The seed determines the initial parameters and the data, for every hook.
    """
    data = ALL_TASKS[task]()
    recipe = data.recipes[trained.recipe or data.usual]
    torch.manual_seed(seed)
    model = commhooks.DistributedDataParallel(data.model())
    handle = commhooks.register(model, trained.create())
    optimizers = recipe.optimizers(model.module)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, data.steps))
        for optimizer in optimizers
    ]
    for step in range(data.steps):
        model.zero_grad()
        data.loss(model, data.batch(seed, step, rank)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    handle.adapter.flush()
    sent = handle.stats().total.wire_bytes
    validation = data.validation(rank, size)
    with torch.no_grad():
        loss = data.loss(model.module, validation).item()
        accuracy = data.accuracy(model.module, validation)
    return TrainingResult(loss, accuracy, math.nan if sent is None else sent * data.steps)


def _rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine to zero."""
    return min(1.0, (step + 1) / (_WARM_UP * steps)) * (1 + math.cos(math.pi * step / steps)) / 2
