"""In a step, hooks need as much memory as documented, besides the bucket and their states."""

from typing import Any

import pytest
import torch
from support.live_memory import LiveMemory
from support.simulated_ranks import simulate
from test_gossip import make_bucket

import commhooks
from commhooks.algorithms import bucket_parameters

COUNT, SHAPE = 4, (1 << 8, 1 << 10)
MODEL_BYTES = COUNT * 4 * SHAPE[0] * SHAPE[1]


class First:
    """The part of a process group that ``prepare`` asks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def peaks_of(name: str, size: int = 2, **options: Any) -> list[float]:
    """Return the peaks of five steps, in copies of the model for each rank."""
    hooks = [commhooks.create(name, **options) for _ in range(size)]
    models = [[torch.randn(SHAPE) for _ in range(COUNT)] for _ in range(size)]
    for hook, parameters in zip(hooks, models, strict=True):
        named = {str(index): parameter for index, parameter in enumerate(parameters)}
        hook.prepare(named, First(size))  # type: ignore[arg-type]
    peaks = []
    for step in range(5):
        buckets = [make_bucket(own, own, step) for own in models]
        with LiveMemory() as memory:
            entries = [entry for hook in hooks for entry in hook.state.values()]
            memory.ignore(*(tensor for entry in entries for tensor in entry.values()))
            memory.ignore(*(bucket.buffer() for bucket in buckets))
            memory.ignore(*(parameter for parameters in models for parameter in parameters))
            simulate(hooks, buckets)
        peaks.append(memory.peak / (size * MODEL_BYTES))
    return peaks


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
def test_averaging_parameters_needs_few_copies(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], copies: int
) -> None:
    monkeypatch.setattr(bucket_parameters, "_PIECE", 1 << 15)  # small against the model
    peaks = peaks_of(name, **options)
    assert copies - 0.5 < max(peaks[2:]) < copies + 0.2, peaks  # the first ones make the state


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_quantized_messages_are_freed_as_soon_as_they_are_read(name: str, bits: int) -> None:
    """With 2 ranks, a half of the averages is the most beside two sets of messages."""
    message = bits / 32
    assert max(peaks_of(name)[1:]) == pytest.approx(0.5 + 1.5 * message, abs=0.03)


def test_a_sparse_message_is_freed_as_soon_as_it_is_sent() -> None:
    """With 2 ranks, what both have sent and the indices of both are the most, beside a copy."""
    assert max(peaks_of("topk", density=0.9, warmup_steps=0)[1:]) < 4.0


def test_a_warm_up_does_not_need_the_messages_of_all_ranks() -> None:
    """The sum, and indices and values of this rank, where most elements are sent."""
    assert max(peaks_of("topk", size=4)[1:]) < 3.5
