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


class PeerTensors:
    """The tensors of the ranks of ``comm``, in memory of ``host``; one per rank, of equal sizes."""

    def __init__(self, host: HostGroup, comm: Communicator) -> None:
        self._host = host
        self._places = [host.ranks.index(rank) for rank in comm.ranks]
        self._offsets = [_WITHHELD] * comm.size
        self._tensors: list[Tensor | None] = [None] * comm.size

    async def gather(
        self, own: Tensor, comm: Communicator, *, is_withheld: bool = False
    ) -> list[Tensor | None]:
        """Return the tensors of all ranks by rank, flat, once all ranks have come here.

        They are not copies: a rank must not write into ``own`` before the others have read it,
        which it learns from a later collective. ``is_withheld``: whether the ranks get None instead
        of the tensor of this rank.
        """
        offset = _WITHHELD if is_withheld else self._host.offset_of(own)
        offsets = (await comm.all_gather(torch.tensor([offset]))).view(-1).tolist()
        for rank, offset in enumerate(offsets):
            if offset != self._offsets[rank]:
                self._offsets[rank] = offset
                self._tensors[rank] = (
                    None
                    if offset == _WITHHELD
                    else self._host.tensor_at(self._places[rank], offset, own)
                )
        return list(self._tensors)

    @staticmethod
    def wire_bytes(size: int) -> int:
        """Return what a rank sends in :meth:`gather` among ``size`` ranks."""
        return all_gather_bytes(torch.int64.itemsize, size)
