"""Collectives among some of the ranks, and messages to one: their order, and their failures."""

import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_threaded_runner import backward, expect_error, make_model, plain_average
from torch import Tensor

import commhooks
from commhooks.adapters import adapter
from commhooks.adapters.adapter import make_runner
from commhooks.runtime.stream_runner import StreamRunner


@dataclass
class TwoLevels(commhooks.CommHook):
    """The average through leaders of pairs, who await more than others; every third bucket plain.

    Raises in bucket 4 before stage ``breaks`` on rank ``culprit``, if that is one of its stages.
    """

    breaks: str = field(default="", init=False, compare=False)
    culprit: int = field(default=0, init=False, compare=False)
    pauses: random.Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pauses = random.Random(dist.get_rank())

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        buffer = bucket.buffer()
        if bucket.index() % 3 == 2:
            self._pause(bucket, comm, "all")
            return (await comm.all_reduce(buffer)).div_(comm.size)
        first = comm.rank - comm.rank % 2
        pair = comm.among(range(first, min(first + 2, comm.size)))
        self._pause(bucket, comm, "pair")
        await pair.all_reduce(buffer)
        if pair.rank == 0:
            leaders = comm.among(range(0, comm.size, 2))
            marker = torch.full((bucket.index() + 1,), float(bucket.index()))
            self._pause(bucket, comm, "first of leaders")
            total = await leaders.all_reduce(marker)
            assert total[0] == leaders.size * bucket.index()
            self._pause(bucket, comm, "second of leaders")
            await leaders.all_reduce(buffer)
        self._pause(bucket, comm, "back")
        await pair.broadcast(buffer)
        self._pause(bucket, comm, "on")
        last = await comm.sendrecv(buffer, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
        assert torch.equal(last, buffer)
        return last.div_(comm.size)

    def _pause(
        self, bucket: commhooks.GradBucket, comm: commhooks.Communicator, stage: str
    ) -> None:
        time.sleep(self.pauses.random() * 2e-3)
        if (stage, comm.rank, bucket.index()) == (self.breaks, self.culprit, 4):
            raise ValueError(f"broken before {stage}")


def train(rank: int, size: int, torch_ddp: bool, inline: bool) -> list[bool]:
    if inline:  # as on backends that keep order themselves
        adapter.make_runner = StreamRunner
    try:
        model = make_model(torch_ddp)
        handle = commhooks.register(model, TwoLevels())
        right = [
            all(map(torch.equal, backward(model, rank, step), plain_average(size, step)))
            for step in range(4)
        ]
        handle.remove()
    finally:
        adapter.make_runner = make_runner
    return right


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("torch_ddp", [False, True])
def test_two_levels_average_exactly_with_random_delays(
    run_ranks: Any, torch_ddp: bool, size: int
) -> None:
    assert run_ranks(train, size, torch_ddp, False) == [[True] * 4] * size


def train_late(rank: int, size: int) -> bool:
    """Bucket 1 comes while rank 1 waits for the next collective of bucket 0 to be connected."""
    model = make_model(False, 2)
    commhooks.register(model, TwoLevels())
    if rank == 1:
        for weight in model.module.weights:
            weight.register_hook(lambda _: time.sleep(0.3))
    return all(map(torch.equal, backward(model, rank, 0), plain_average(size, 0, 2)))


def test_collectives_of_other_subgroups_do_not_wait_for_later_buckets(run_ranks: Any) -> None:
    assert run_ranks(train_late, 2, timeout=20.0) == [True] * 2


@pytest.mark.parametrize("size", [1, 3])
def test_two_levels_on_the_stream_runner(run_ranks: Any, size: int) -> None:
    try:
        assert run_ranks(train, size, False, True) == [[True] * 4] * size
    finally:
        commhooks.testing.close_ranks()  # the workers have a runner that was tampered with


def fail_once(rank: int, size: int, breaks: str, culprit: int) -> tuple[list[str], list[bool]]:
    model = make_model(False)
    hook = TwoLevels()
    commhooks.register(model, hook)
    messages: list[str] = []
    right = []
    for step in range(5):
        if step in (0, 3):
            hook.breaks, hook.culprit = breaks, culprit
            with expect_error(messages):
                backward(model, rank, step)
            hook.breaks = ""
        else:
            found, expected = backward(model, rank, step), plain_average(size, step)
            right.append(all(map(torch.equal, found, expected)))
    return messages, right


@pytest.mark.parametrize(
    ("breaks", "culprit"),
    [
        ("pair", 3),
        ("first of leaders", 2),
        ("second of leaders", 0),
        ("back", 2),
        ("on", 0),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                *[("pair", 0), ("pair", 2), ("back", 0), ("back", 3), ("on", 2), ("on", 3)],
                *[("first of leaders", 0), ("second of leaders", 2)],
            ]
        ),
    ],
)
def test_a_failure_among_some_ranks_reaches_all(run_ranks: Any, breaks: str, culprit: int) -> None:
    for rank, (messages, right) in enumerate(run_ranks(fail_once, 4, breaks, culprit)):
        assert right == [True] * 3
        kind = "CommHookError" if rank == culprit else "CommHookPeerError"
        for message in messages:
            assert message.startswith(kind)
            assert f"[rank {culprit}] hook TwoLevels" in message
            assert f"ValueError: broken before {breaks}" in message
