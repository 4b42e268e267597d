"""Check that all ranks have the same value."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from reducer.peers import collective

__all__: list[str] = []

T = TypeVar("T")


def check_agreement(
    value: T,
    group: dist.ProcessGroup,
    device: torch.device,
    explain: Callable[[Sequence[T]], Exception],
    what: str,
) -> int:
    """Raise ``explain(values of all ranks)`` on every rank if ranks have different values.

    Collective over ``group``: one all-gather of 16 bytes per rank, on ``device``. Values are
    compared by a hash of their ``repr``; they are sent, pickled, only if they differ.

    Returns a random number, which is the same on all ranks. Raises CommHookPeerError if a peer is
    lost during ``what``.
    """
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    own = torch.tensor(
        [int.from_bytes(digest, "little", signed=True), secrets.randbits(62)], device=device
    )
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    with collective(group, what):
        dist.all_gather(gathered, own, group=group)
        digests, numbers = torch.stack(gathered).T.tolist()
    if len(set(digests)) > 1:
        values = [value] * group.size()
        with collective(group, what):
            dist.all_gather_object(values, value, group=group)
        raise explain(values)
    return int(numbers[0])
