"""A failure on backends that keep order themselves: Note [Failures on NCCL], tested on Gloo."""

import gc
import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_threaded_runner import backward, make_model, plain_average
from torch import Tensor

import commhooks
from commhooks.adapters import adapter
from commhooks.comm import stream_groups
from commhooks.comm.stream_groups import StreamGroups
from commhooks.runtime.runner import make_runner
from commhooks.runtime.stream_runner import StreamRunner

CPU = torch.device("cpu")


@dataclass
class Fragile(commhooks.CommHook):
    """Raises on one rank before its second collective, if it is told so."""

    breaks: bool = False

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        wire = await comm.all_reduce(bucket.buffer())
        if self.breaks and comm.rank == 1 and bucket.index() == 1:
            raise ValueError("broken between two collectives")
        return (await comm.all_reduce(wire)).div_(comm.size**2)


def fail_and_replace(rank: int, size: int, on_torch_ddp: bool) -> tuple[list[str], list[bool]]:
    adapter.make_runner = StreamRunner  # type: ignore[assignment]
    try:
        model = make_model(on_torch_ddp)
        hook = Fragile()
        handle = commhooks.register(model, hook)
        messages = []
        right = [all(map(torch.equal, backward(model, rank, 0), plain_average(size, 0)))]
        hook.breaks = True
        for step in (1, 2):
            with pytest.raises(commhooks.CommHookError) as caught:
                backward(model, rank, step)
            messages.append(f"{caught.type.__name__}: {caught.value}")
            hook.breaks = False
        del caught
        handle.replace(Fragile())
        right.append(all(map(torch.equal, backward(model, rank, 3), plain_average(size, 3))))
    finally:
        adapter.make_runner = make_runner
    return messages, right


@pytest.mark.parametrize("on_torch_ddp", [False, True])
def test_a_failure_ends_the_hook_on_all_ranks_until_it_is_replaced(
    run_ranks: Any, on_torch_ddp: bool
) -> None:
    for rank, (messages, right) in enumerate(run_ranks(fail_and_replace, 3, on_torch_ddp)):
        assert right == [True] * 2
        for step, message in enumerate(messages):
            assert message.startswith(f"CommHook{'' if rank == 1 else 'Peer'}Error: [rank {rank}]")
            assert "[rank 1] hook Fragile" in message
            assert "ValueError: broken between two collectives" in message
            assert ("load a checkpoint on all of them" in message) == (step == 1)


# ------------------------------------------------------------- aborts, with simulated backends


class FakeBackend:
    """A backend whose collectives never end unless it is aborted."""

    options = SimpleNamespace(_timeout=timedelta(seconds=30))

    def __init__(self, *_: Any) -> None:
        self.aborted = threading.Event()

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborted.set()


class FakeGroup:
    """A process group with one rank of two, and a store that both share."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def _get_backend(self, _: torch.device) -> FakeBackend:
        return FakeBackend()

    def get_group_store(self) -> dist.Store:
        return self._store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


def two_ranks() -> list[StreamGroups]:
    store = dist.HashStore()
    both: Any = [FakeGroup(store, rank) for rank in range(2)]
    groups = [StreamGroups(group, 7, CPU) for group in both]
    threads = [threading.Thread(target=each.open, args=(0,)) for each in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return groups


def test_peers_abort_what_is_under_way() -> None:
    failing, waiting = two_ranks()
    fakes: Any = [groups.open(0) for groups in (failing, waiting)]
    failing.fail(commhooks.CommHookError("[rank 0] out of memory"))
    assert fakes[0].aborted.is_set()
    assert fakes[1].aborted.wait(30)  # by the thread that watches
    waiting.join(30)
    with pytest.raises(commhooks.CommHookPeerError, match=r"^\[rank 1\] another .*out of memory"):
        waiting.open(0)
    with pytest.raises(commhooks.CommHookError, match=r"^\[rank 0\] the hook failed in an earlier"):
        failing.open(0)
    for groups in (failing, waiting):
        groups.close()


def test_groups_that_are_replaced_at_once_are_aborted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_groups, "_WATCH_SECONDS", 60.0)  # too late
    failing, waiting = two_ranks()
    fake: Any = waiting.open(0)
    failing.fail(commhooks.CommHookError("[rank 0] out of memory"))
    waiting.close()
    assert fake.aborted.is_set()
    failing.close()


def test_the_watching_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_groups, "_WATCH_SECONDS", 0.01)
    closed, dropped = two_ranks()
    watchers = [closed._watcher, dropped._watcher]
    fake: Any = closed.open(0)
    closed.close()
    assert not fake.aborted.is_set()
    alive = weakref.ref(dropped)
    del dropped
    gc.collect()
    for watcher in watchers:
        assert watcher is not None
        watcher.join(30)
        assert not watcher.is_alive()
    assert alive() is None


def test_nobody_watches_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_groups, "_WATCH_SECONDS", 0.01)
    groups, other = two_ranks()
    looks = []

    def lose(keys: list[str]) -> bool:
        looks.append(keys)
        raise dist.DistNetworkError("the store has left")

    monkeypatch.setattr(groups, "_own_store", SimpleNamespace(check=lose))
    groups.join(30)
    assert groups._watcher is not None
    assert not groups._watcher.is_alive()
    assert len(looks) == 1
    for each in (groups, other):
        each.close()


def test_a_store_that_is_gone_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = FakeGroup(dist.HashStore(), 0)
    groups = StreamGroups(group, 7, CPU)

    def lose(*_: object) -> None:
        raise dist.DistNetworkError("the store has left")

    monkeypatch.setattr(groups, "_meet", lose)
    with pytest.raises(commhooks.CommHookPeerError, match="cannot meet: the store has left"):
        groups.open(0)
