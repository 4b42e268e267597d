"""Times of a device that works behind the host: with events that this machine can do without."""

import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from algorithms.adaptive.test_auto import CANDIDATES, PARAMETERS, Links, agree, agreed_of, train

import commhooks
from commhooks.algorithms.adaptive import auto
from commhooks.algorithms.wrappers import timing
from commhooks.algorithms.wrappers.timing import HOST, DeviceClock, clock_of
from commhooks.runtime.side_stream import SideStream
from commhooks.testing.probe import Trainer

CPU = torch.device("cpu")


class Event:
    """Passes ``LAG`` nanoseconds after it was recorded, and tells times as CUDA's events do."""

    LAG = 20_000_000
    synchronized = 0
    step = 0

    def __init__(self, device: object = None, *, enable_timing: bool = False) -> None:
        self.ns: int | None = None
        self.recorded = -1
        self.is_timed = enable_timing

    def record(self, _: object = None) -> None:
        self.ns = time.monotonic_ns() + self.LAG
        self.recorded = Event.step

    def query(self) -> bool:
        assert self.ns is not None
        return time.monotonic_ns() >= self.ns

    def synchronize(self) -> None:
        assert self.recorded < Event.step, "the host waits for an event of the same step"
        Event.synchronized += 1
        while not self.query():
            time.sleep(0.001)

    def elapsed_time(self, end: "Event") -> float:
        assert self.is_timed
        assert end.is_timed
        assert self.ns is not None
        assert end.ns is not None
        return torch.tensor((end.ns - self.ns) * 1e-6, dtype=torch.float32).item()


def event_at(ns: int) -> Any:
    event = Event(enable_timing=True)
    event.ns = ns
    return event


def test_the_host_knows_at_once_and_a_device_when_it_has_come_so_far() -> None:
    assert HOST.seconds(3, 5) == pytest.approx(2e-9)
    assert clock_of(CPU) is HOST
    clock = clock_of(torch.device("meta"))
    assert isinstance(clock, DeviceClock)
    before = Event.synchronized
    now = time.monotonic_ns()
    assert clock.seconds(event_at(now), event_at(now + 200_000_000)) == pytest.approx(0.2)
    assert time.monotonic_ns() >= now + 200_000_000
    assert Event.synchronized > before


def follow_a_device(rank: int, size: int) -> None:
    def mark(_: SideStream, *, timed: bool = False) -> Event:
        event = Event(enable_timing=timed)
        event.record()
        return event

    with ExitStack() as stack:
        stack.enter_context(patch.object(timing.torch, "Event", Event))
        stack.enter_context(patch.object(SideStream, "mark", mark))
        stack.enter_context(patch.object(auto, "clock_of", DeviceClock))
        Links(stack)
        # Nested hooks tell the runner to time launches as well.
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        outer = commhooks.create("schedule", stages=[(0, hook)])
        trainer = Trainer(outer, PARAMETERS, bucket_cap_mb=0.02)
        for step in range(30):
            Event.step = step
            before, reports = Event.synchronized, reports_in(hook, step)
            train(trainer, rank, range(step, step + 1))
            assert reports or Event.synchronized == before  # the host reads for reports only
        assert Event.synchronized > 0
        plan = agree(hook)
        assert set(plan.hook_of().values()) > {"allreduce"}
        assert 0.0005 < hook.metrics()["step_seconds"] < 10


def reports_in(hook: Any, step: int) -> bool:
    agreed = agreed_of(hook)
    return agreed is not None and step >= agreed.report


def test_auto_measures_a_device_that_works_behind_the_host(run_ranks: Any) -> None:
    run_ranks(follow_a_device, 2)
