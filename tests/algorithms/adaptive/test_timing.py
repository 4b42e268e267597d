"""Times of a device that works behind the host: with events that this machine can do without."""

import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from algorithms.adaptive.test_auto import CANDIDATES, PARAMETERS, Links, agree, train

import commhooks
from commhooks.algorithms.adaptive import auto, timing
from commhooks.algorithms.adaptive.timing import HOST, StreamTimes, times_of
from commhooks.runtime.side_stream import SideStream
from commhooks.testing.probe import Trainer

CPU = torch.device("cpu")


class Event:
    """Passes ``LAG`` nanoseconds after it was recorded, and tells times as CUDA's events do."""

    LAG = 20_000_000
    synchronized = 0

    def __init__(self, device: object = None, *, enable_timing: bool = False) -> None:
        self.ns: int | None = None
        self.is_timed = enable_timing

    def record(self, _: object = None) -> None:
        self.ns = time.monotonic_ns() + self.LAG

    def query(self) -> bool:
        assert self.ns is not None
        return time.monotonic_ns() >= self.ns

    def synchronize(self) -> None:
        Event.synchronized += not self.query()
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


def test_functions_are_called_in_order_when_the_device_has_come_so_far() -> None:
    times, found = StreamTimes(CPU), list[Any]()
    past, future = time.monotonic_ns() - 10**9, time.monotonic_ns() + 10**12
    times.when_known((event_at(past), event_at(past + 5_000)), lambda a, b: found.append(b - a))
    times.when_known((), lambda: found.append("after"))
    assert found == []
    times.when_known((event_at(future),), lambda _: found.append("future"))
    times.when_known((event_at(past),), lambda _: found.append("behind the future"))
    times.settle(wait=False)
    assert found == [pytest.approx(5_000, abs=1), "after"]
    times.forget()
    times.settle(wait=True)
    assert len(found) == 2


def test_the_host_knows_at_once() -> None:
    found: list[int] = []
    HOST.when_known((3, 5), lambda a, b: found.append(b - a))
    assert found == [2]
    assert times_of(CPU) is HOST
    assert isinstance(times_of(torch.device("meta")), StreamTimes)


def test_a_day_of_training_does_not_blur_the_times() -> None:
    """Float32 milliseconds of a day would be 8 ms apart."""
    times, found = StreamTimes(CPU), list[int]()
    for i in range(24 * 360):
        start = 1 + i * 10 * 10**9
        times.when_known(
            (event_at(start), event_at(start + 40_000)), lambda a, b: found.append(b - a)
        )
    with patch.object(Event, "query", lambda _: True):
        times.settle(wait=True)
    assert found[1:] == pytest.approx([40_000] * len(found[1:]), abs=1_000)


def follow_a_device(rank: int, size: int) -> None:
    def mark(_: SideStream, *, timed: bool = False) -> Event:
        event = Event(enable_timing=timed)
        event.record()
        return event

    with ExitStack() as stack:
        stack.enter_context(patch.object(timing.torch, "Event", Event))
        stack.enter_context(patch.object(SideStream, "mark", mark))
        stack.enter_context(patch.object(auto, "times_of", StreamTimes))
        Links(stack)
        # Nested hooks tell the runner to time launches as well.
        hook: Any = commhooks.create("auto", error=0.3, candidates=CANDIDATES)
        outer = commhooks.create("schedule", stages=[(0, hook)])
        trainer = Trainer(outer, PARAMETERS, bucket_cap_mb=0.02)
        for step in range(30):
            before, reports = Event.synchronized, reports_in(hook, step)
            train(trainer, rank, range(step, step + 1))
            assert reports or Event.synchronized == before  # the host waits for reports only
        assert Event.synchronized > 0
        plan = agree(hook)
        assert set(plan.hook_of().values()) > {"allreduce"}
        assert 0.0005 < hook.metrics()["step_seconds"] < 10
        known = [k for of_hook in hook._control.knowledge._of_hooks for k in of_hook]
        local = [sum(trial.local_seconds) for k in known for trial in k.trials]
        assert all(0 < seconds < 1 for seconds in local)
        assert hook._measuring._times._waiting
        hook.recover()
        assert not hook._measuring._times._waiting


def reports_in(hook: Any, step: int) -> bool:
    control = hook._control
    return control is not None and control.reports(step)


def test_auto_measures_a_device_that_works_behind_the_host(run_ranks: Any) -> None:
    run_ranks(follow_a_device, 2)
