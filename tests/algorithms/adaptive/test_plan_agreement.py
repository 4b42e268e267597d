"""What rank 0 decides reaches all ranks in the same step, and no step reads what it has sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.simulated_ranks import simulate
from torch import Tensor

import commhooks
from commhooks.algorithms.adaptive.agreement import Agreement


@dataclass
class Agreeing(commhooks.CommHook):
    """Sends what is due, and keeps what was decided, with the step in which it was there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.agreement: Agreement[Any] = Agreement(self.decide)
        self.found: list[tuple[int, Any]] = []

    def decide(self, reports: Sequence[Any], step: int) -> Any:
        return step, *reports

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        answer = self.agreement.begin_step(bucket.step)
        if answer is not None:
            self.found.append((bucket.step, answer))
        await self.agreement.send(comm, bucket.buffer().device)
        return bucket.buffer()


def take(hooks: Sequence[Agreeing], *steps: int) -> None:
    for step in steps:
        like = [torch.zeros(3)]
        buckets = [commhooks.GradBucket(torch.zeros(3), like, ["w"], step=step) for _ in hooks]
        simulate(hooks, buckets)


def begin(hooks: Sequence[Agreeing], *reports: object) -> None:
    for hook, report in zip(hooks, reports, strict=True):
        hook.agreement.begin(report)


@pytest.mark.parametrize("length", [1, 100_000])
def test_ranks_learn_in_the_same_step_what_rank_0_has_decided(length: int) -> None:
    """A longer message than those before takes a step more, and only once."""
    hooks = [Agreeing(), Agreeing()]
    begin(hooks, "a" * length, "b")
    take(hooks, *range(10))
    decided, known = (1, 2) if length == 1 else (2, 3)
    expected = [(known, (decided, "a" * length, "b"))]
    assert [hook.found for hook in hooks] == [expected, expected]
    assert not any(hook.agreement.is_open for hook in hooks)
    begin(hooks, "c", "d" * length)
    take(hooks, *range(10, 20))
    expected += [(12, (11, "c", "d" * length))]
    assert [hook.found for hook in hooks] == [expected, expected]


def test_a_step_that_has_failed_sends_its_message_again() -> None:
    """What it has sent counts for nothing: other ranks may not have it."""
    hooks = [Agreeing(), Agreeing()]
    begin(hooks, "a", "b")
    take(hooks, 0, 0, 1, 1, 1)
    assert all(hook.found == [] for hook in hooks)
    take(hooks, 2)
    assert [hook.found for hook in hooks] == [[(2, (1, "a", "b"))]] * 2


def test_what_was_cancelled_is_not_decided() -> None:
    hooks = [Agreeing(), Agreeing()]
    begin(hooks, "a", "b")
    take(hooks, 0)
    for hook in hooks:
        hook.agreement.cancel()
    begin(hooks, "c", "d")
    take(hooks, 1, 2, 3)
    assert [hook.found for hook in hooks] == [[(3, (2, "c", "d"))]] * 2
