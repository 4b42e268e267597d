"""CUDA graphs of hooks: replays of buckets, and of whole steps, do what the hooks do."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.captured_hooks import HOOKS, STEPS, train, whole_steps
from support.several_ranks import PATIENCE

from commhooks.runtime import replays, stream_runner
from commhooks.testing import run_ranks
from commhooks.testing.compare import same_bits


def buckets_are_replayed(rank: int, size: int, config: dict[str, Any]) -> None:
    counted = [0]

    def launch(replay: replays.Replay) -> None:
        counted[0] += 1
        original(replay)

    original = replays.Replay.launch
    runs = []
    for most in (0, 3):
        with (
            patch.object(replays, "MAX_CAPTURES", most),
            patch.object(replays.Replay, "launch", launch),
            patch.object(stream_runner, "SENDS_ALONE", True),
        ):
            runs.append(train(config, rank, range(STEPS), device="cuda"))
            torch.cuda.synchronize()
            assert (counted[0] > 0) == (most > 0)
    assert same_bits(*runs)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", HOOKS)
def test_replayed_buckets(name: str, size: int) -> None:
    run_ranks(buckets_are_replayed, size, HOOKS[name], backend="nccl", timeout=PATIENCE)


def steps_are_replayed(rank: int, size: int, config: dict[str, Any]) -> None:
    assert same_bits(*(whole_steps(rank, size, config, captured=it) for it in (False, True)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", HOOKS)
def test_replayed_steps(name: str, size: int) -> None:
    """Forward, backward, hook and optimizer are one graph."""
    run_ranks(steps_are_replayed, size, HOOKS[name], backend="nccl", timeout=PATIENCE)
