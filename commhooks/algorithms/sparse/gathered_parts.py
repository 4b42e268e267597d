"""The parts of all ranks, and their mean.

On the CPU each part is read and added by itself. On a GPU all are read and added at once, by four
kernels, whatever the number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.algorithms.sparse.part import SparseLayout, SparsePart, to_memory_dtype
from commhooks.algorithms.sparse.selection import scatter_add
from commhooks.comm.communicator import Communicator
from commhooks.kernels import backend_of
from commhooks.kernels import sparse as kernels

__all__ = ["GatheredParts", "gather"]


class GatheredParts(ABC):
    """What all ranks have sent of a bucket."""

    verdict: Tensor
    """() bool: whether all sent finite numbers only; so they had no others. See Note [All finite].

    A damaged message makes it false on a GPU; on the CPU it raises RuntimeError.
    """

    @abstractmethod
    def store_mean(self, buffer: Tensor) -> Tensor:
        """``buffer``, overwritten with the mean of the parts, summed in the order of ranks."""

    def end(self, own: SparsePart, total: Tensor, error: Tensor, buffer: Tensor) -> Tensor:
        """As :meth:`store_mean`; ``error`` becomes what ``own`` leaves of ``total``.

        That, only if the verdict is true. ``total`` may be ``buffer``, and is used up.
        """
        own.leave(total, error, self.verdict)
        return self.store_mean(buffer)


async def gather(
    own: SparsePart, counts: Sequence[int], numel: int, comm: Communicator
) -> GatheredParts:
    """The parts of all ranks, in one all-gather padded to the longest of them.

    ``counts``: of the numbers in each rank's part. If there are none at all, nothing is sent.
    """
    layout = SparseLayout.of(numel, max(counts), own.values.dtype)
    if layout.capacity == 0:
        return _NoParts(own)
    messages = await comm.all_gather(layout.write(own))
    if backend_of(messages) is None:
        return _ReadParts(messages, layout, counts)
    return _PartsOnDevice(messages, layout, comm.rank)


class _NoParts(GatheredParts):
    def __init__(self, own: SparsePart) -> None:
        self.verdict = torch.ones((), dtype=torch.bool, device=own.values.device)

    def store_mean(self, buffer: Tensor) -> Tensor:
        return buffer.zero_()


class _ReadParts(GatheredParts):
    def __init__(self, messages: Tensor, layout: SparseLayout, counts: Sequence[int]) -> None:
        pairs = zip(messages, counts, strict=True)
        self._parts = [layout.read(message, count) for message, count in pairs]
        self.verdict = torch.stack([part.values.isfinite().all() for part in self._parts]).all()

    def store_mean(self, buffer: Tensor) -> Tensor:
        mean = to_memory_dtype(buffer.zero_())
        for part in self._parts:
            scatter_add(part.values.to(mean.dtype) / len(self._parts), part.indices, mean)
        return buffer.copy_(mean)


class _PartsOnDevice(GatheredParts):
    def __init__(self, messages: Tensor, layout: SparseLayout, rank: int) -> None:
        self._rank = rank
        self._received = kernels.receive(
            messages, layout.code.for_kernels, layout.capacity, layout.dtype, layout.numel
        )
        self.verdict = self._received.verdict

    def store_mean(self, buffer: Tensor) -> Tensor:
        """NaN where the verdict is false."""
        kernels.store_mean(self._received, buffer)
        return buffer

    def end(self, own: SparsePart, total: Tensor, error: Tensor, buffer: Tensor) -> Tensor:  # noqa: ARG002
        """One pass for both. What this rank has sent has come back, with the parts of all."""
        kernels.store_mean(self._received, buffer, own_rank=self._rank, total=total, error=error)
        return buffer
