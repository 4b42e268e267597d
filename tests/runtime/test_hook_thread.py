"""The thread of a runner, and those that wait for collectives."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue
from unittest import mock

import pytest
import torch

from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime.executor import Executor
from commhooks.runtime.hook_thread import HookThread
from commhooks.runtime.side_stream import SideStream


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
def thread() -> Iterator[HookThread]:
    thread = HookThread("hook", mock.Mock(StageGroups, epoch=0), SideStream(torch.device("cpu")))
    thread.serve(mock.Mock(Executor, **{"fail_without.return_value": []}), grace=0.0)
    yield thread
    thread.stop()


@pytest.fixture
def called(thread: HookThread) -> SimpleQueue[int]:
    """What the thread has been asked to call, in order; the thread runs."""
    found: SimpleQueue[int] = SimpleQueue()
    thread.call(lambda: found.put(0))
    assert found.get() == 0
    return found


def adding(found: SimpleQueue[int], number: int) -> Callable[[], None]:
    return lambda: found.put(number)


def test_functions_are_called_when_works_complete(
    thread: HookThread, called: SimpleQueue[int]
) -> None:
    first, second, other = Work(), Work(RuntimeError("lost")), Work()
    thread.watch(first, adding(called, 1), 0)
    thread.watch(second, adding(called, 2), 0)
    thread.watch(other, adding(called, 3), 1)
    other.may_end.set()
    assert called.get() == 3
    second.may_end.set()
    thread.call(adding(called, 7))
    assert called.get() == 7
    assert first.is_awaited.wait(60)
    assert not second.is_awaited.is_set()  # works of one group are waited for in order
    first.may_end.set()
    assert [called.get(), called.get()] == [1, 2]


def test_works_behind_one_that_never_completes_get_another_thread(
    thread: HookThread, called: SimpleQueue[int]
) -> None:
    never, later, last = Work(), Work(), Work()
    for number, work in enumerate([never, later]):
        thread.watch(work, adding(called, number), 0)
    later.may_end.set()
    last.may_end.set()
    assert never.is_awaited.wait(60)  # otherwise another thread would wait for it
    assert not later.is_awaited.is_set()
    thread.groups.is_closed_within.side_effect = [False, True]  # type: ignore[attr-defined]
    assert thread.groups.on_loss is not None
    thread.groups.on_loss(0)  # the executor gives up what is under way
    thread.call(lambda: thread.watch(last, adding(called, 2), 0))
    assert [called.get(), called.get()] == [1, 2]
    never.may_end.set()
    assert called.get() == 0


def test_the_waiting_threads_end_with_the_thread(
    thread: HookThread, called: SimpleQueue[int]
) -> None:
    work = Work()
    thread.watch(work, adding(called, 1), 0)
    names = {"hook", "commhooks-wait"}
    started = [each for each in threading.enumerate() if each.name in names]
    assert {each.name for each in started} == names
    thread.stop()
    work.may_end.set()
    for each in started:
        each.join(60)
        assert not each.is_alive()
    thread.groups.abandon.assert_called()  # type: ignore[attr-defined]
