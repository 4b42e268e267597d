"""The demo's GPT, enlarged, as a training for :mod:`commhooks.lab.comparison.training`, so that

    commhooks compare --model bench.slow_link.training:make_gpt \\
        --train bench.slow_link.training:train --link 100mbit --hooks ...

runs it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from examples.stdlib_text import load_corpus, train_batch, validation_batches

__all__ = ["make_gpt", "train"]

LENGTH = 64  # bytes of a sequence
SEQUENCES = 2  # per rank and step: about 0.13 s of forward and backward on one core
VALIDATION_SEQUENCES = 64  # of all ranks together
PEAK_RATE = 2.5e-4  # of this, 5e-4, 1e-3 and 2e-3 the best for plain averaging
WARM_UP_STEPS = 20
LARGEST_NORM = 1.0


def make_gpt() -> GPT:
    """Create the GPT, with 10.8 million parameters."""
    return GPT(GPTConfig(layers=6, heads=6, width=384, block_size=LENGTH))


def train(model: nn.Module, rank: int, world_size: int) -> Iterator[Callable[[], float]]:
    """Train with the demo's AdamW, at a constant learning rate after a linear warm-up.

    The loss after a step therefore does not depend on the number of steps planned. All hooks get
    the same data.
    """
    corpus = load_corpus()
    held_out = validation_batches(
        corpus.validation,
        VALIDATION_SEQUENCES // world_size,
        LENGTH,
        world_size,
        rank=rank,
        world_size=world_size,
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)
    )
    module: nn.Module = getattr(model, "module", model)

    def validate() -> float:
        return sum(module(*batch).item() for batch in held_out) / len(held_out)

    step = 0
    while True:
        batch = train_batch(corpus.train, SEQUENCES, LENGTH, seed=0, step=step, rank=rank)
        optimizer.zero_grad()
        model(*batch).backward()
        nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
        optimizer.step()
        schedule.step()
        step += 1
        yield validate
