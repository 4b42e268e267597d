"""Check that all ranks have the same value."""

import hashlib
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from reducer.errors import CommHookMismatchError
from reducer.peers import collective, wait

T = TypeVar("T")

_PATIENCE_SECONDS = 30.0


def check_agreement(
    value: T,
    group: dist.ProcessGroup,
    device: torch.device,
    explain: Callable[[Sequence[T]], Exception],
    what: str,
) -> int:
    """Raise ``explain(values of all ranks)`` on every rank if ranks have different values.

    Collective over ``group``; raises as :func:`values_of_ranks`, too. Returns a random number that
    is the same on all ranks.
    """
    values, number = _gather(value, group, device, what)
    if len({repr(other) for other in values}) > 1:
        raise explain(values)
    return number


def values_of_ranks(value: T, group: dist.ProcessGroup, device: torch.device, what: str) -> list[T]:
    """Return the values of all ranks.

    Collective over ``group``: one all-gather of 16 bytes per rank, on ``device``. Values are
    compared by a hash of their ``repr``; they are sent, pickled, only if they differ.

    Raises:
        CommHookPeerError: A peer is lost during ``what``.
        CommHookMismatchError: Another rank is in another call than ``what``; on every rank.
    """
    return _gather(value, group, device, what)[0]


def _gather(
    value: T, group: dist.ProcessGroup, device: torch.device, what: str
) -> tuple[list[T], int]:
    """Return the values of all ranks and a random number, which is the same on all ranks."""
    digest = hashlib.blake2b(repr((what, value)).encode(), digest_size=8).digest()
    own = torch.tensor(
        [int.from_bytes(digest, "little", signed=True), secrets.randbits(62)], device=device
    )
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    with _late_ranks_named(group, what):
        wait(dist.all_gather(gathered, own, group=group, async_op=True))
        digests, numbers = torch.stack(gathered).T.tolist()
    values = [value] * group.size()
    if len(set(digests)) > 1:
        found: list[tuple[str, T]] = [(what, value)] * group.size()
        with collective(group, what):
            dist.all_gather_object(found, (what, value), group=group)
        for rank, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise CommHookMismatchError(
                    f"[rank {group.rank()}] expected the same call on all ranks, found on rank 0: "
                    f"{found[0][0]}; on rank {rank}: {theirs}. Make these calls in the same order "
                    "on all ranks"
                )
        values = [each for _, each in found]
    return values, int(numbers[0])


@contextmanager
def _late_ranks_named(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Name the ranks that are missing in the block: warn after a long time, raise if it fails.

    A rank whose program leaves ``what`` out never comes, which is an error only after the time-out
    of the group, 30 minutes by default.
    """
    group_store = group.get_group_store()
    if group_store is None:  # a group that is written in Python may have none
        with collective(group, what):
            yield
        return
    store = PrefixStore("commhooks/agreements", group_store)

    def late() -> list[int]:
        return [rank for rank in range(group.size()) if store.add(f"rank {rank}", 0) < calls]

    def warn() -> None:
        if ranks := late():
            warnings.warn(
                f"[rank {group.rank()}] {what} has waited {_PATIENCE_SECONDS:g} s for ranks "
                f"{ranks}. If their program leaves it out, call it on all ranks, in the same "
                "order; if they are late, nothing is wrong",
                stacklevel=1,
            )

    timer = threading.Timer(_PATIENCE_SECONDS, warn)
    timer.daemon = True
    with collective(group, what, late):
        calls = store.add(f"rank {group.rank()}", 1)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
