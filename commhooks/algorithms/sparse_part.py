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
from commhooks.wire import all_gather_bytes
from reducer import GradBucket

__all__ = [
    "SparseLayout",
    "SparsePart",
    "are_finite",
    "fit",
    "gather",
    "gather_bytes",
    "kept_elements",
    "store_mean",
    "to_memory_dtype",
]


def to_memory_dtype(buffer: Tensor) -> Tensor:
    """The same tensor in float32 or float64; a copy where it is in half precision."""
    return buffer.to(torch.promote_types(buffer.dtype, torch.float32))


def kept_elements(density: float, numel: int) -> int:
    """How many of a bucket's elements are sent: the nearest integer, but one if there is any."""
    return min(numel, max(1, round(density * numel)))


def fit(values: Tensor, dtype: torch.dtype, share: int = 1) -> Tensor:
    """Rounded to ``dtype``; finite numbers beyond its range, or that share of it, are cut.

    With error feedback, what is rounded or cut off remains to be sent. Infinity there would be the
    end: the error would stay as it is, and be too large again in the next step.
    """
    if dtype != values.dtype:
        largest = torch.finfo(dtype).max / share
        values = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
    return values.to(dtype)


@dataclass(frozen=True)
class SparsePart:
    """``values`` at ``indices`` of a bucket; all else is not sent. Both (count,)."""

    indices: Tensor
    values: Tensor

    @classmethod
    def of(cls, total: Tensor, indices: Tensor, dtype: torch.dtype) -> "SparsePart":
        """Copies ``total[indices]``, made to :func:`fit` ``dtype``."""
        return cls(indices, fit(total.index_select(0, indices), dtype))

    @property
    def count(self) -> int:
        return self.indices.numel()

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

    ``counts``: of the numbers in each rank's part. If there are none at all, nothing is sent.
    """
    dtype = own.values.dtype
    longest = SparseLayout(numel, max(counts), dtype).nbytes
    message = own.indices.new_zeros(longest, dtype=torch.uint8)
    SparseLayout(numel, counts[comm.rank], dtype).write(own, message)
    messages = await comm.all_gather(message) if longest > 0 else [message] * comm.size
    return [
        SparseLayout(numel, count, dtype).read(message)
        for count, message in zip(counts, messages, strict=True)
    ]


def gather_bytes(bucket: GradBucket, density: float, size: int) -> int:
    """What each of ``size`` ranks sends when :func:`gather` has that share of the elements."""
    buffer = bucket.buffer()
    count = kept_elements(density, buffer.numel())
    return all_gather_bytes(SparseLayout(buffer.numel(), count, buffer.dtype).nbytes, size)


def are_finite(parts: Sequence[SparsePart]) -> bool:
    """Whether all ranks sent finite numbers only; so they had no others. Waits for the device."""
    return bool(torch.stack([part.values.isfinite().all() for part in parts]).all())


def store_mean(parts: Sequence[SparsePart], buffer: Tensor) -> Tensor:
    """``buffer``, overwritten with the mean of the parts, summed in the order of ranks."""
    mean = to_memory_dtype(buffer.zero_())
    for part in parts:
        scatter_add(part.values.to(mean.dtype) / len(parts), part.indices, mean)
    return buffer.copy_(mean)
