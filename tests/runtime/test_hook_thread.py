"""The thread of a runner, and those that wait for collectives."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks.comm.stage_groups import StageKey
from commhooks.runtime.hook_thread import HookThread
from commhooks.runtime.scheduler import Scheduler
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.waiters import Waiters

FIRST: StageKey = (0, (), 0)
SECOND: StageKey = (0, (), 1)
LATER: StageKey = (1, (), 0)


class Work(torch._C._distributed_c10d.Work):
    """Completes when the test says so. It has no future."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.is_awaited, self.may_end = threading.Event(), threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.is_awaited.set()
        self.may_end.wait()
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def told() -> SimpleQueue[Any]:
    """What the scheduler has been told, in order."""
    return SimpleQueue()


@pytest.fixture
def waiters() -> Waiters:
    return Waiters(SideStream(torch.device("cpu")))


@pytest.fixture
def thread(waiters: Waiters, told: SimpleQueue[Any]) -> Iterator[HookThread]:
    """A thread that runs. It sees a lost peer in the first look, and nothing is left afterwards."""
    scheduler = mock.Mock(Scheduler, waiters=waiters, groups=mock.Mock())
    scheduler.complete.side_effect = told.put
    scheduler.close.side_effect = waiters.close
    looks = iter([False, True])
    scheduler.abort_without_peer.side_effect = lambda epoch: told.put(-1) or next(looks)
    thread = HookThread("hook", scheduler, SideStream(torch.device("cpu")), grace=0.01)
    thread.call(lambda: told.put(0))
    assert told.get() == 0
    yield thread
    thread.close()


def test_the_scheduler_continues_when_works_complete(
    thread: HookThread, waiters: Waiters, told: SimpleQueue[Any]
) -> None:
    first, second, other = Work(), Work(RuntimeError("lost")), Work()
    waiters.watch(FIRST, first)
    waiters.watch(FIRST, second)
    waiters.watch(SECOND, other)
    other.may_end.set()
    assert told.get() == SECOND
    second.may_end.set()
    thread.call(lambda: told.put(7))
    assert told.get() == 7
    assert first.is_awaited.wait(60)
    assert not second.is_awaited.is_set()  # works of one group are waited for in order
    first.may_end.set()
    assert [told.get(), told.get()] == [FIRST, FIRST]


def test_a_work_that_never_completes_holds_up_none_of_a_later_epoch(
    thread: HookThread, waiters: Waiters, told: SimpleQueue[Any]
) -> None:
    never, later = Work(), Work()
    waiters.watch(FIRST, never)
    assert never.is_awaited.wait(60)
    later.may_end.set()
    waiters.watch(LATER, later)
    assert told.get() == LATER
    _, left = waiters._waiters[FIRST]
    waiters.end_epoch(0)
    assert not left.is_awaited  # type: ignore[attr-defined]  # at the end of the interpreter
    never.may_end.set()
    assert told.get() == FIRST
    left.join(60)
    assert not left.is_alive()


def test_a_lost_peer_is_looked_for_until_nothing_is_left(
    thread: HookThread, told: SimpleQueue[Any]
) -> None:
    tell = thread._scheduler.groups.on_loss
    assert tell is not None
    start = time.monotonic()
    for _ in range(2):  # of two subgroups
        tell(0)
    assert [told.get(), told.get()] == [-1, -1]
    assert time.monotonic() - start >= 2 * thread._grace
    thread.wait()
    assert not thread._lost
    assert told.empty()


def test_a_loss_does_not_start_a_thread() -> None:
    scheduler = mock.Mock(Scheduler, waiters=mock.Mock(inbox=SimpleQueue()), groups=mock.Mock())
    thread = HookThread("hook", scheduler, SideStream(torch.device("cpu")), grace=60.0)
    scheduler.groups.on_loss(0)
    thread.wait()
    assert not thread.is_alive()
    thread.call(int)  # the loss is known from the beginning
    thread.wait()
    assert list(thread._lost) == [0]
    thread.close()


def test_a_call_that_raises_aborts_what_is_unfinished(thread: HookThread) -> None:
    thread.call(lambda: next(iter(())))
    thread.wait()
    abort: Any = thread._scheduler.abort_because
    abort.assert_called_once_with("the runner failed", mock.ANY)


def test_the_waiting_threads_end_with_the_thread(thread: HookThread, waiters: Waiters) -> None:
    work = Work()
    waiters.watch(FIRST, work)
    names = {"hook", "commhooks-wait"}
    started = [each for each in threading.enumerate() if each.name in names]
    assert {each.name for each in started} == names
    assert work.is_awaited.wait(60)
    thread.close()
    work.may_end.set()
    for each in started:
        each.join(60)
        assert not each.is_alive()
    close: Any = thread._scheduler.close
    close.assert_called_once_with()
