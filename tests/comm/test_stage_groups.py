"""Stage groups connect on several threads of each rank: those of models, and of exchanges."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks.comm.stage_groups import StageGroups
from commhooks.errors import CommHookPeerError


class _InTurn(StageGroups):
    """Connects at once, or a while after another one has begun to connect on this rank."""

    begins: threading.Event
    is_first: bool

    def _make_group(self, *arguments: Any) -> Any:
        if self.is_first:
            self.begins.set()
        else:
            self.begins.wait()
            time.sleep(0.3)  # until the other one waits for its peer
        return super()._make_group(*arguments)


def connect_both(rank: int, size: int) -> list[int]:
    group, begins = dist.distributed_c10d._get_default_group(), threading.Event()
    kept: list[_InTurn] = []  # until the peer has connected, too
    found: list[int] = []

    def connect(number: int) -> None:
        groups = _InTurn(group, 77 + number)
        groups.begins, groups.is_first = begins, number == rank
        kept.append(groups)
        found.append(groups.open(0).size())

    threads = [threading.Thread(target=connect, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    return found


def test_a_thread_that_connects_does_not_lock_out_the_other_one(run_ranks: Any) -> None:
    """Each rank first connects what the other one connects last."""
    assert run_ranks(connect_both, 2) == [[2, 2]] * 2


class _Unreachable:
    """A store whose host has gone: a new connection to it is tried for minutes."""

    def __init__(self) -> None:
        self.is_tried, self.has_failed = threading.Event(), threading.Event()

    def clone(self) -> None:
        self.is_tried.set()
        self.has_failed.wait()
        raise dist.DistNetworkError("The client socket has timed out")


def connect_beside_another_hook(rank: int, size: int) -> int:
    group, store = dist.distributed_c10d._get_default_group(), _Unreachable()
    aborted = StageGroups(group, 79)
    aborted._group_store = store  # type: ignore[assignment]

    def connect_in_vain() -> None:
        with pytest.raises(CommHookPeerError):
            aborted.open(0)

    thread = threading.Thread(target=connect_in_vain)
    thread.start()
    store.is_tried.wait()
    groups = StageGroups(group, 80)  # kept until the peer has connected, too
    connected = groups.open(0).size()
    store.has_failed.set()
    thread.join()
    dist.barrier()
    return connected


def test_a_hook_whose_store_has_gone_does_not_lock_out_the_others(run_ranks: Any) -> None:
    assert run_ranks(connect_beside_another_hook, 2) == [2, 2]


class _WithoutClones(dist.Store):
    """A store written in Python, as those of launchers may be."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or timedelta(seconds=30))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._store.compare_set(key, expected, desired)


def connect_through_a_store_in_python(rank: int, size: int) -> int:
    group = dist.distributed_c10d._get_default_group()
    groups = StageGroups(group, 81)
    groups._group_store = _WithoutClones(group.get_group_store().clone())
    connected = groups.open(0).size()
    dist.barrier()
    return connected


def test_a_store_that_cannot_be_cloned_is_shared(run_ranks: Any) -> None:
    assert run_ranks(connect_through_a_store_in_python, 2) == [2, 2]


def open_two_stages(rank: int, size: int) -> list[list[int]]:
    groups = StageGroups(dist.distributed_c10d._get_default_group(), 78)
    groups.on_loss = lambda epoch: None
    found = []
    for stage in range(2):
        groups.open(stage)
        found.append([len(watch._pairs) for watch in groups._watches])
    dist.barrier()  # what is aborted closes connections, which others may still open
    groups.abort()
    found.append([len(watch._pairs) for watch in groups._watches])
    dist.barrier()
    return found


def test_neighbors_watch_each_other_from_the_first_stage_on(run_ranks: Any) -> None:
    """Later, a bucket with a large message and one with a small one could wait for each other."""
    assert run_ranks(open_two_stages, 2) == [[[1], [1], []]] * 2
    assert run_ranks(open_two_stages, 3) == [[[2], [2], []]] * 3


class _Late(StageGroups):
    """On one rank, opens the last stage a while after the others, or fails to."""

    def open(self, stage: int, ranks: tuple[int, ...] = ()) -> Any:
        group = super().open(stage, ranks)
        if self._rank == 1 and stage == 1:
            time.sleep(0.3)  # until others could have returned
            if self._prefix.endswith("fail"):
                raise RuntimeError("no file descriptors are left")
            self._store.set("rank 1 has opened all", "")
        return group


def connect_late(rank: int, size: int) -> tuple[bool, str]:
    groups = _Late(dist.distributed_c10d._get_default_group(), 82)
    groups.connect({(): 2})
    all_are_open = groups._store.check(["rank 1 has opened all"])
    broken = _Late(dist.distributed_c10d._get_default_group(), 82, purpose="fail")
    with pytest.raises(RuntimeError) as error:
        broken.connect({(): 2})
    dist.barrier()
    return all_are_open, str(error.value)


def test_no_rank_goes_on_before_all_are_connected(run_ranks: Any) -> None:
    """It could close what others still connect; and if one cannot connect, all must know."""
    assert run_ranks(connect_late, 3) == [(True, "no file descriptors are left")] * 3


def close_what_is_in_use(rank: int, size: int) -> str:
    """Rank 0 fails while it waits for rank 1, which is alive and sends nothing."""
    groups = StageGroups(dist.distributed_c10d._get_default_group(), 85)
    groups.connect({(): 2})
    dist.barrier()
    failed = ""
    if rank == 0:
        buffer = torch.zeros(3)
        work = groups.open(1).recv([buffer], 1, 0)
        groups.abort([(0, (), 1)])
        assert list(groups._aborted) == [(0, (), 1)]  # the other one was not in use
        assert not work.is_completed()
        groups.close_connections()
        errors: list[str] = []
        waits = threading.Thread(target=lambda: errors.append(error_of(work)), daemon=True)
        waits.start()
        waits.join(10)
        failed = errors[0]
        groups.drop_unused(())
        assert not groups._aborted
    dist.barrier()
    return failed


def error_of(work: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    return str(caught.value)


def test_connections_of_groups_in_use_are_closed_after_a_failure(run_ranks: Any) -> None:
    """So that no late message is written to memory that is in use again."""
    failed, _ = run_ranks(close_what_is_in_use, 2)
    assert failed
