"""Threads that wait for collectives, and the queue on which another thread waits for them."""

import threading
from datetime import timedelta

import torch

from commhooks.runtime.completion_queue import CompletionQueue
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


def test_tokens_come_when_works_complete() -> None:
    queue = CompletionQueue(SideStream(torch.device("cpu")))
    first, second, other = Work(), Work(RuntimeError("lost")), Work()
    queue.watch(first, 1, 0)
    queue.watch(second, 2, 0)
    queue.watch(other, 3, 1)
    other.may_end.set()
    assert queue.get() == 3
    second.may_end.set()
    queue.put(7)
    assert queue.get() == 7
    assert first.is_awaited.wait(60)
    assert not second.is_awaited.is_set()  # works of one stage are waited for in order
    first.may_end.set()
    assert [queue.get(), queue.get()] == [1, 2]


def test_works_behind_one_that_never_completes_get_another_thread() -> None:
    queue = CompletionQueue(SideStream(torch.device("cpu")))
    never, later, last = Work(), Work(), Work()
    for token, work in enumerate([never, later]):
        queue.watch(work, token, 0)
    later.may_end.set()
    last.may_end.set()
    assert never.is_awaited.wait(60)  # otherwise another thread would wait for it
    assert not later.is_awaited.is_set()
    queue.forget()
    queue.watch(last, 2, 0)
    assert [queue.get(), queue.get()] == [1, 2]
    never.may_end.set()
    assert queue.get() == 0


def test_the_threads_of_a_queue_end_with_it() -> None:
    before = set(threading.enumerate())
    queue = CompletionQueue(SideStream(torch.device("cpu")))
    work = Work()
    queue.watch(work, 1, 0)
    (thread,) = set(threading.enumerate()) - before
    queue.close()
    work.may_end.set()
    queue.join(60)
    assert not thread.is_alive()
    assert queue.get() == 1
