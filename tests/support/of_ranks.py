"""Tensors of all ranks, in functions that run on several."""

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gathered", "same_on_all_ranks"]


def gathered(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors of all ranks, which have the same shape. Collective."""
    own = tensor.detach().contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return found


def same_on_all_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether the tensors of all ranks are equal. Collective."""
    return all(torch.equal(tensor, other) for other in gathered(tensor, group))
