"""Hooks need as much memory as documented, and keep none when they are not used again."""

from typing import Any

import pytest
import torch
from support.live_memory import LiveMemory
from support.simulated_ranks import Group, simulate
from test_gossip import make_bucket

import commhooks
from commhooks.algorithms import AllReduce, bucket_parameters, exact
from commhooks.algorithms.wrappers.table import HookTable

COUNT, SHAPE = 4, (1 << 8, 1 << 10)
MODEL_BYTES = COUNT * 4 * SHAPE[0] * SHAPE[1]


def peaks_of(name: str, size: int = 2, **options: Any) -> list[float]:
    """Return the peaks of five steps, in copies of the model for each rank."""
    hooks = [commhooks.create(name, **options) for _ in range(size)]
    models = [[torch.randn(SHAPE) for _ in range(COUNT)] for _ in range(size)]
    for hook, parameters in zip(hooks, models, strict=True):
        named = {str(index): parameter for index, parameter in enumerate(parameters)}
        hook.prepare(named, Group(0, size))  # type: ignore[arg-type]
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


LEFT = [
    ("int8", {}),
    ("powersgd", {"start_step": 0}),
    ("batched_powersgd", {"start_step": 0}),
    ("dgc", {}),
    ("bf16", {}),
    ("error_feedback", {}),
]


def kept_after_steps(hooks: Any, before: Any = lambda _: None) -> list[float]:
    """Return what is kept after each of four steps, in copies of the model for each rank."""
    parameters = [torch.zeros(SHAPE) for _ in range(COUNT)]
    found = []
    with LiveMemory() as memory:
        memory.ignore(*parameters)
        for step in range(4):
            before(step)
            buckets = [make_bucket([torch.randn(SHAPE)] * COUNT, parameters, step) for _ in hooks]
            simulate(hooks, buckets)
            del buckets
            found.append(memory.now() / (len(hooks) * MODEL_BYTES))
    return found


@pytest.fixture(params=LEFT, ids=str)
def left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hook that keeps something, by its config."""
    monkeypatch.setattr(exact, "_LARGE", 0)  # smaller buckets have no memory for their messages
    name, options = request.param
    return {"name": name, **options}


def test_a_schedule_frees_what_a_hook_has_kept(left: Any) -> None:
    stages = [(0, left), (2, "allreduce")]
    kept = kept_after_steps([commhooks.create("schedule", stages=stages) for _ in range(2)])
    assert kept[1] > 0.4, kept
    assert kept[3] < 0.01, kept


def test_a_table_frees_what_a_hook_has_kept(left: Any) -> None:
    """So do ``auto`` and ``guard``, which go on with another hook in this way."""
    tables = [HookTable([commhooks.create(left), AllReduce()], {}) for _ in range(2)]

    def change(step: int) -> None:
        for table in tables:
            if step in (0, 2):
                table.change({str(i): int(step == 2) for i in range(COUNT)})
            table.begin_step()

    kept = kept_after_steps(tables, change)
    assert kept[1] > 0.4, kept
    assert kept[3] < 0.01, kept
