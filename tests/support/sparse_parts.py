"""Parts of sparse gradients, and the messages that carry them, for tests of kernels."""

import torch
from torch import Tensor

from commhooks.algorithms.sparse.part import SparseLayout, SparsePart
from support.lockstep import LockstepCommunicator


def choose(numel: int, count: int, seed: int = 0) -> Tensor:
    """Ascending indices, the first and the last among them where there are several."""
    generator = torch.Generator().manual_seed(numel + seed)
    if numel < 10**6:
        chosen = torch.randperm(numel, generator=generator)[:count]
    else:
        chosen = torch.randint(numel, (count,), generator=generator).unique()
    chosen = chosen.sort().values.int()
    if count > 1:
        chosen[0], chosen[-1] = 0, numel - 1
    return chosen


def part_of(numel: int, count: int, dtype: torch.dtype, rank: int = 0) -> SparsePart:
    indices = choose(numel, count, rank)
    generator = torch.Generator().manual_seed(rank)
    return SparsePart(indices, torch.randn(len(indices), generator=generator).to(dtype))


class Received(LockstepCommunicator):
    """Gathers what it is given instead of what is sent."""

    def __init__(self, messages: Tensor, rank: int = 0) -> None:
        super().__init__(rank, len(messages), 0)
        self.messages = messages

    async def all_gather(self, tensor: Tensor) -> Tensor:
        return self.messages.clone()


def written(parts: list[SparsePart], numel: int) -> Tensor:
    capacity = max(part.count for part in parts)
    layout = SparseLayout(numel, capacity, parts[0].values.dtype)
    return torch.stack([layout.write(part) for part in parts])
