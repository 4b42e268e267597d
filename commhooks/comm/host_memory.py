"""Tensors that ranks of one host read in each other's memory.

Note [Host memory] in csrc/host/host_group.h is about the memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_gather_bytes
from reducer.native import HostGroup

_WITHHELD = -1


def host_of(buffer: Tensor, ranks: Sequence[int]) -> HostGroup | None:
    """Return the ranks of this host, if they share ``buffer`` and all of ``ranks`` are among them.

    ``ranks`` all get a group, or all None, for the same bucket.
    """
    host = HostGroup.of(buffer)
    return host if host is not None and set(ranks) <= set(host.ranks) else None


async def share(
    own: Tensor, comm: Communicator, host: HostGroup, *, is_withheld: bool = False
) -> list[Tensor] | None:
    """Return the tensors of all ranks of ``comm``, flat and by rank, once all have come here.

    They are not copies: a rank must not write to ``own``, in memory of ``host``, before the others
    have read it, which it learns from a later collective. ``is_withheld``: whether all ranks get
    None, because this one has nothing to share.
    """
    offset = _WITHHELD if is_withheld else host.offset_of(own)
    offsets = (await comm.all_gather(torch.tensor([offset], device="cpu"))).view(-1).tolist()
    if _WITHHELD in offsets:
        return None
    return host.tensors_at(dict(zip(comm.ranks, offsets, strict=True)), own)


def share_bytes(size: int) -> int:
    """Return the bytes that :func:`share` sends among ``size`` ranks."""
    return all_gather_bytes(torch.int64.itemsize, size)
