"""Hooks that average parameters need few copies of them at a time, however large the model is."""

from typing import Any

import pytest
import torch
from support.live_memory import LiveMemory
from support.simulated_ranks import simulate
from test_gossip import make_bucket

import commhooks
from commhooks.algorithms import bucket_parameters

SIZE, COUNT, SHAPE = 2, 4, (1 << 8, 1 << 10)
MODEL_BYTES = COUNT * 4 * SHAPE[0] * SHAPE[1]


class First:
    """The part of a process group that ``prepare`` asks."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return SIZE


@pytest.mark.parametrize(
    ("name", "options", "copies"),
    [
        ("local_sgd", {"period": 1}, 1),  # the mean
        ("gossip", {"what": "parameters"}, 2),  # what is sent and received
        ("diloco", {"period": 1}, 1),  # the outer gradients
        ("diloco", {"period": 1, "delay": 1}, 2),  # and those that arrive
    ],
    ids=str,
)
def test_a_step_needs_few_copies_of_the_model(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], copies: int
) -> None:
    monkeypatch.setattr(bucket_parameters, "_PIECE", 1 << 15)  # small against the model
    hooks = [commhooks.create(name, **options) for _ in range(SIZE)]
    models = [[torch.randn(SHAPE) for _ in range(COUNT)] for _ in range(SIZE)]
    for hook, parameters in zip(hooks, models, strict=True):
        hook.prepare({str(i): each for i, each in enumerate(parameters)}, First())  # type: ignore[arg-type]
    peaks = []
    for step in range(5):
        buckets = [make_bucket(own, own, step) for own in models]
        with LiveMemory() as memory:
            entries = [entry for hook in hooks for entry in hook.state.values()]
            memory.ignore(*(tensor for entry in entries for tensor in entry.values()))
            memory.ignore(*(bucket.buffer() for bucket in buckets))
            memory.ignore(*(parameter for parameters in models for parameter in parameters))
            simulate(hooks, buckets)
        peaks.append(memory.peak / (SIZE * MODEL_BYTES))
    assert copies - 0.5 < max(peaks[2:]) < copies + 0.2, peaks  # the first ones make the state
