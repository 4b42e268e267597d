"""Sparse vectors, and the messages that carry them, for tests of kernels."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from commhooks import Communicator
from commhooks.algorithms.sparse.messages import (
    GatheredVectors,
    SparseVector,
    gather,
    write_message,
)
from commhooks.codecs.index_code import IndexCode
from support.simulated_ranks import Group


def choose(numel: int, count: int, seed: int = 0) -> Tensor:
    """Draw ascending indices; if there are several, the first and the last are among them."""
    generator = torch.Generator().manual_seed(numel + seed)
    if numel < 10**6:
        chosen = torch.randperm(numel, generator=generator)[:count]
    else:
        chosen = torch.randint(numel, (count,), generator=generator).unique()
    chosen = chosen.sort().values.int()
    if count > 1:
        chosen[0], chosen[-1] = 0, numel - 1
    return chosen


def random_vector(numel: int, count: int, dtype: torch.dtype, rank: int = 0) -> SparseVector:
    indices = choose(numel, count, rank)
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(len(indices), generator=generator).to(dtype)
    return SparseVector(indices, values, numel)


def written(vectors: Sequence[SparseVector]) -> Tensor:
    """Return the messages of all ranks, padded to the longest, (ranks, bytes)."""
    code = IndexCode.shortest(vectors[0].numel, max(vector.count for vector in vectors))
    return torch.stack([write_message(vector, code) for vector in vectors])


def gathered(messages: Tensor, vectors: Sequence[SparseVector], rank: int = 0) -> GatheredVectors:
    """Run :func:`gather` on one of the ranks, with ``messages`` as what arrives."""
    coroutine = gather(
        vectors[rank], [vector.count for vector in vectors], _Received(messages, rank)
    )
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    received: GatheredVectors = stop.value.value
    return received


class _Received(Communicator):
    """Gathers what it is given instead of what is sent."""

    def __init__(self, messages: Tensor, rank: int) -> None:
        # With more ranks than one, long messages would be summed.
        super().__init__(Group(rank, 1), step=0, key="")  # type: ignore[arg-type]
        self.messages = messages

    async def all_gather(self, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return self.messages.clone()
