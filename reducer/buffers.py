"""Copy tensors, such as the buffers of a module, from one rank to all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _broadcast_coalesced

from reducer.peers import collective

BROADCAST_BYTES = 250 * 2**20
"""The size up to which tensors are broadcast together."""


def broadcast(group: dist.ProcessGroup, tensors: Iterable[Tensor], root: int) -> None:
    """Overwrite tensors with those of the group's rank ``root``. Collective."""
    tensors = [tensor.detach() for tensor in tensors]
    if tensors and group.size() > 1:
        with collective(group, f"the broadcast of {len(tensors)} tensors of rank {root}"):
            _broadcast_coalesced(group, tensors, BROADCAST_BYTES, root)
