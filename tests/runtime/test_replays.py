"""Replays of hooks, on CUDA graphs that are emulated: support/recorded_graphs.py."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.captured_hooks import HOOKS, STEPS, train
from support.recorded_graphs import recorded_graphs
from torch import Tensor

import commhooks
from commhooks.adapters import adapter
from commhooks.hook.base import tree
from commhooks.runtime import replays
from commhooks.runtime.stream_runner import StreamRunner
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

on_an_ordered_backend = patch.object(adapter, "ThreadedRunner", StreamRunner)
without_graphs = patch.object(replays, "MAX_CAPTURES", 0)
USUAL = ("int8", "topk", "powersgd", "error feedback")


@on_an_ordered_backend
def replays_are_steps(rank: int, size: int, config: dict[str, Any]) -> tuple[int, int, int]:
    """Check that steps are the same with replays. Return captures, replays, and the first step."""
    first = [each.capturable_from for each in tree(commhooks.create(config))]
    assert None not in first
    with recorded_graphs() as graphs:
        with without_graphs:
            expected = train(config, rank, range(STEPS))
            resumed = train(config, rank, range(STEPS, 2 * STEPS), expected[1])
        assert graphs.captures == 0
        found = train(config, rank, range(STEPS))
        assert same_bits(expected, found)
        counts = graphs.captures, graphs.replays
        assert same_bits(resumed, train(config, rank, range(STEPS, 2 * STEPS), found[1]))
    return *counts, max(step or 0 for step in first)


@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.exhaustive) for name in HOOKS],
)
def test_replays_do_what_the_hook_does(run_ranks: Any, name: str) -> None:
    found = run_ranks(replays_are_steps, 2, HOOKS[name])
    captures, count, first = found[0]
    assert found[0] == found[1]
    # The first step that may be captured makes the states, the second one is captured.
    assert captures > 1
    assert count == captures * (STEPS - first - 1)


@on_an_ordered_backend
def loads_and_loses(rank: int, size: int) -> None:
    """States are replaced, and memory changes."""
    parameters = probe_parameters()
    gradients = draw_gradients(parameters, 0, rank)
    with recorded_graphs() as graphs:
        trainers = [
            Trainer(commhooks.create("int8"), parameters, stable_buckets=True) for _ in range(2)
        ]
        saved = [trainer.handle.state_dict() for trainer in trainers]
        for number in range(5):
            with without_graphs:
                expected = trainers[0].step(gradients)
            assert same_bits(expected, trainers[1].step(gradients))
            if number == 2:
                before = graphs.replays
                assert before > 0
                for trainer, state in zip(trainers, saved, strict=True):
                    trainer.handle.load_state_dict(state)
            if number == 3:
                assert graphs.replays == before  # the hook ran, with the loaded states
        assert graphs.replays > before
        assert graphs.captures == 2 * len(trainers[1].handle.stats().buckets)


def test_another_state_is_captured_anew(run_ranks: Any) -> None:
    run_ranks(loads_and_loses, 2)


@dataclass
class Counting(commhooks.CommHook):
    """Reads a number on the host, and counts the runs."""

    capturable_from = 0
    reads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runs = 0

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.runs += 1
        result = await comm.all_reduce(bucket.buffer())
        return result * (2.0 if self.reads and result[0].item() > 1e9 else 1.0)


@dataclass
class Numbering(Counting):
    """Keeps the step and the index of each bucket."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[tuple[int, int]] = []

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.seen.append((bucket.step, bucket.index()))
        return await super().reduce(bucket, comm)


def bucket_in(memory: Tensor, step: int, index: int = 0) -> commhooks.GradBucket:
    parameter = torch.nn.Parameter(torch.zeros_like(memory))
    return commhooks.GradBucket(memory, [parameter], [f"p{index}"], index=index, step=step)


def moves_memory(rank: int, size: int) -> tuple[int, int]:
    """A bucket that changes its memory again and again is captured three times."""
    assert dist.group.WORLD is not None
    hook = Counting()
    memories = torch.zeros(2, 8)
    with recorded_graphs() as graphs:
        runner = StreamRunner(hook, dist.group.WORLD, torch.device("cpu"), 0)
        for step in range(40):
            memory = memories[step // 4 % 2].fill_(step)
            assert torch.equal(runner(bucket_in(memory, step)).wait(), torch.full((8,), 2.0 * step))
    return graphs.captures, hook.runs


def test_memory_that_moves_is_not_captured_for_ever(run_ranks: Any) -> None:
    # In three groups of four steps, two of each are replays; the second run is captured.
    assert run_ranks(moves_memory, 2) == 2 * [(3, 40 - 3 * 2)]


def routes_beside_replays(rank: int, size: int) -> list[tuple[int, int]]:
    """The memory of bucket 1 changes, when bucket 0 is replayed already."""
    assert dist.group.WORLD is not None
    nested = Numbering()
    hook = commhooks.create("route", rules=[("*", nested)])
    hook.prepare({f"p{i}": torch.nn.Parameter(torch.zeros(8)) for i in range(2)}, dist.group.WORLD)
    first, *memories = torch.zeros(7, 8)
    with recorded_graphs():
        runner = StreamRunner(hook, dist.group.WORLD, torch.device("cpu"), 0)
        for step in range(6):
            for index, memory in enumerate((first, memories[max(0, step - 2)])):
                runner(bucket_in(memory, step, index)).wait()
    return nested.seen


def test_route_begins_a_step_though_its_first_bucket_is_replayed(run_ranks: Any) -> None:
    runs = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (4, 0), (5, 0)]
    assert run_ranks(routes_beside_replays, 1) == [runs]


def reads_while_captured(rank: int, size: int) -> str:
    assert dist.group.WORLD is not None
    memory = torch.zeros(8)
    with recorded_graphs():
        runner = StreamRunner(Counting(reads=True), dist.group.WORLD, torch.device("cpu"), 0)
        runner(bucket_in(memory, 0)).wait()
        with pytest.raises(commhooks.CommHookError) as caught:
            runner(bucket_in(memory, 1)).wait()
    return str(caught.value)


def test_a_hook_that_cannot_be_captured_says_how_to_go_on(run_ranks: Any) -> None:
    for message in run_ranks(reads_while_captured, 2):
        assert "not permitted when the stream is capturing" in message
        assert "COMMHOOKS_CUDA_GRAPHS=0" in message


def ends_steps(rank: int, size: int) -> list[int]:
    """Return how many all-reduces ended each step: Note [Replays], failures."""
    group = dist.group.WORLD
    assert group is not None
    found = []
    with recorded_graphs():
        runner = StreamRunner(Counting(), group, torch.device("cpu"), 0)
        memories = [torch.zeros(8) for _ in range(4)]
        for step in range(4):
            memory = memories[step if rank == 1 else 0]  # nothing is replayed on rank 1
            bucket = commhooks.GradBucket(
                memory, [torch.nn.Parameter(memory)], ["p"], step=step, is_last=True
            )
            with patch.object(type(group), "allreduce", autospec=True) as sent:
                with patch.object(StreamRunner, "_run", return_value=memory):
                    runner(bucket)
                found.append(sent.call_count)
    return found


def test_the_watchdog_sees_steps_with_replays(run_ranks: Any) -> None:
    assert run_ranks(ends_steps, 2) == 2 * [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("given", "captures", "register"),
    [
        ({}, 0, None),
        ({"COMMHOOKS_CUDA_GRAPHS": "1"}, 3, "0"),
        ({"COMMHOOKS_CUDA_GRAPHS": "1", "NCCL_GRAPH_REGISTER": "1"}, 3, "1"),
        ({"COMMHOOKS_CUDA_GRAPHS": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}, 0, None),
        ({"COMMHOOKS_CUDA_GRAPHS": "1", "NCCL_BLOCKING_WAIT": "1"}, 0, None),
    ],
    ids=["off", "on", "registering", "blocking", "blocking, by its old name"],
)
def test_the_switch(given: dict[str, str], captures: int, register: str | None) -> None:
    code = (
        "import os; from commhooks.runtime import replays; "
        "print((replays.MAX_CAPTURES, os.environ.get('NCCL_GRAPH_REGISTER')))"
    )
    others = {name: value for name, value in os.environ.items() if "NCCL_" not in name}
    environment = {**others, "PYTHONPATH": os.pathsep.join(sys.path), **given}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str((captures, register))
