"""Runs one hook per rank inside this process, on real communicators: fast, for many ranks."""

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from commhooks import CommHook, Communicator, GradBucket
from commhooks.comm.communicator import PendingCollective
from commhooks.comm.exchange import Exchange

C = TypeVar("C", bound=Communicator)
Call = tuple[str, tuple[Any, ...]]


class Group:
    """The part of a process group that a communicator and ``prepare`` use."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class _RecordingGroup(Group):
    """Keeps the collective that is started on it."""

    call: Call

    def __getattr__(self, name: str) -> Callable[..., None]:
        def record(*arguments: Any) -> None:
            self.call = name, arguments

        return record


def simulate(
    hooks: Sequence[CommHook],
    buckets: Sequence[GradBucket],
    *,
    kind: type[C] = Communicator,  # type: ignore[assignment]
    wants_contribution: bool = False,
) -> tuple[list[Tensor], list[C]]:
    """Return the results of all ranks, and their communicators, which have counted the bytes.

    Exchanges that begin in this step have ended when it returns.
    """
    size = len(hooks)
    comms = [
        kind(
            Group(rank, size),  # type: ignore[arg-type]
            step=buckets[rank].step,
            key=buckets[rank].key,
            seed=getattr(hooks[rank], "seed", 0),
        )
        for rank in range(size)
    ]
    for comm in comms:
        comm.wants_contribution = wants_contribution
    steps = [hook.reduce(*given) for hook, *given in zip(hooks, buckets, comms, strict=True)]
    results = _run(steps, comms)
    for begun in zip(*(comm.begun for comm in comms), strict=True):
        for exchange, result in zip(begun, _run([e.run() for e in begun], comms), strict=True):
            exchange.future = Future()
            exchange.future.set_result(result)
    return results, comms


def _run(
    coroutines: Sequence[Coroutine[Any, Any, Tensor]], comms: Sequence[Communicator]
) -> list[Tensor]:
    """Run one coroutine per rank to its end."""
    size = len(coroutines)
    runs = dict(enumerate(coroutines))
    results: dict[int, Tensor] = {}
    waiting: dict[int, PendingCollective] = {}
    try:
        with torch.no_grad():
            while len(results) < size:
                for rank in runs.keys() - waiting.keys() - results.keys():
                    try:
                        awaited = runs[rank].send(None)
                        while isinstance(awaited, Exchange):  # which has ended
                            awaited = runs[rank].send(None)
                        waiting[rank] = awaited
                    except StopIteration as stop:
                        results[rank] = stop.value
                with _disable_current_modes():
                    _complete(waiting, comms, list(range(size)))
    finally:
        for run in runs.values():
            run.close()
    return [results[rank] for rank in range(size)]


def _complete(
    waiting: dict[int, PendingCollective], comms: Sequence[Communicator], world: list[int]
) -> None:
    """Run the collectives that all of their ranks are waiting for."""
    found = bool(not waiting)
    for ranks in {tuple(collective.members or world) for collective in waiting.values()}:
        collectives = [waiting.get(rank) for rank in ranks]
        if any(r is None or tuple(r.members or world) != ranks for r in collectives):
            continue
        groups = [_RecordingGroup(position, len(ranks)) for position in range(len(ranks))]
        for rank, group in zip(ranks, groups, strict=True):
            collective = waiting.pop(rank)
            collective.issued_ns = time.monotonic_ns()
            collective.start(group)  # type: ignore[arg-type]
            comms[rank].wire_bytes += collective.count()
        names = {group.call[0] for group in groups}
        assert len(names) == 1, f"ranks {ranks} await different collectives: {names}"
        _COLLECTIVES[names.pop()]([group.call[1] for group in groups])
        found = True
    assert found, f"ranks wait for each other: {waiting}"


def _all_reduce(calls: list[Any]) -> None:
    total = torch.stack([tensors[0] for tensors, _ in calls]).sum(0)
    for (tensor,), _ in calls:
        tensor.copy_(total)


def _broadcast(calls: list[Any]) -> None:
    root = calls[0][1].rootRank
    for (tensor,), _ in calls:
        tensor.copy_(calls[root][0][0].clone())


def _all_to_all(calls: list[Any]) -> None:
    split = [
        sent.split(sizes or [len(sent) // len(calls)] * len(calls)) for _, sent, _, sizes in calls
    ]
    for (received, _, sizes, _), parts in zip(calls, zip(*split, strict=True), strict=True):
        assert not sizes or sizes == [len(part) for part in parts]
        received.copy_(torch.cat(parts))


def _all_gather(calls: list[Any]) -> None:
    own = [own for _, own in calls]
    for gathered, _ in calls:
        gathered.copy_(torch.cat(own))


_COLLECTIVES: dict[str, Callable[[list[Any]], None]] = {
    "allreduce": _all_reduce,
    "_allgather_base": _all_gather,
    "broadcast": _broadcast,
    "alltoall_base": _all_to_all,
}
