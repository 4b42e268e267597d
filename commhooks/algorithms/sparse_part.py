"""What a sparse hook sends: some numbers of a bucket, and where they belong.

On the wire, as bytes:   | values, in the bucket's dtype | indices, see Note [Index code] |

The size follows from the number of elements and the number of those that are sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.algorithms.index_code import IndexCode
from commhooks.algorithms.sparse import scatter_add
from commhooks.communicator import Communicator

__all__ = ["SparseLayout", "SparsePart", "are_finite", "gather", "store_mean", "to_memory_dtype"]


def to_memory_dtype(buffer: Tensor) -> Tensor:
    """The same tensor in float32 or float64; a copy where it is in half precision."""
    return buffer.to(torch.promote_types(buffer.dtype, torch.float32))


@dataclass(frozen=True)
class SparsePart:
    """``values`` at ``indices`` of a bucket; all else is not sent. Both (count,)."""

    indices: Tensor
    values: Tensor

    @classmethod
    def of(cls, total: Tensor, indices: Tensor, dtype: torch.dtype) -> "SparsePart":
        """Copies ``total[indices]``, rounded to ``dtype``.

        A number beyond the range of ``dtype`` is sent as the largest one; the rest remains to be
        sent, as what is rounded off does.
        """
        values = total.index_select(0, indices)
        if dtype != values.dtype:
            largest = torch.finfo(dtype).max
            values = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
        return cls(indices, values.to(dtype))

    def leave(self, total: Tensor, error: Tensor) -> None:
        """``error`` becomes what is not sent of ``total``: sent + error == total, exactly."""
        error.copy_(total)
        scatter_add(-self.values.to(error.dtype), self.indices, error)

    def dense(self, like: Tensor) -> Tensor:
        """With zeros for what is not sent."""
        out = torch.zeros_like(like)
        scatter_add(self.values.to(out.dtype), self.indices, out)
        return out


@dataclass(frozen=True)
class SparseLayout:
    """How a part of ``count`` out of ``numel`` elements is written."""

    numel: int
    count: int
    dtype: torch.dtype

    @property
    def code(self) -> IndexCode:
        return IndexCode.shortest(self.numel, self.count)

    @property
    def value_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.value_bytes + self.code.nbytes

    def write(self, part: SparsePart, message: Tensor) -> None:
        """Into the first ``nbytes`` of ``message``, uint8."""
        message[: self.value_bytes] = part.values.view(torch.uint8)
        self.code.pack(part.indices, out=message[self.value_bytes : self.nbytes])

    def read(self, message: Tensor) -> SparsePart:
        """The values are a view of ``message``."""
        values = message[: self.value_bytes].view(self.dtype)
        return SparsePart(self.code.unpack(message[self.value_bytes : self.nbytes]), values)


async def gather(
    own: SparsePart, counts: Sequence[int], numel: int, comm: Communicator
) -> list[SparsePart]:
    """The parts of all ranks, by rank, in one all-gather padded to the longest of them.

    ``counts``: of each rank's part.
    """
    dtype = own.values.dtype
    longest = SparseLayout(numel, max(counts), dtype).nbytes
    message = own.indices.new_zeros(longest, dtype=torch.uint8)
    SparseLayout(numel, counts[comm.rank], dtype).write(own, message)
    messages = await comm.all_gather(message)
    return [
        SparseLayout(numel, count, dtype).read(message)
        for count, message in zip(counts, messages, strict=True)
    ]


def are_finite(parts: Sequence[SparsePart]) -> bool:
    """Whether all ranks sent finite numbers only; so they had no others. Waits for the device."""
    return bool(torch.stack([part.values.isfinite().all() for part in parts]).all())


def store_mean(parts: Sequence[SparsePart], buffer: Tensor) -> Tensor:
    """``buffer``, overwritten with the mean of the parts, summed in the order of ranks."""
    mean = to_memory_dtype(buffer.zero_())
    for part in parts:
        scatter_add(part.values.to(mean.dtype) / len(parts), part.indices, mean)
    return buffer.copy_(mean)
