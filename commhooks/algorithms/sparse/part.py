"""What a sparse hook sends: some numbers of a bucket, and where they belong.

On the wire, as bytes:   | indices, see Note [Index code] | values, in the bucket's dtype |

The size follows from the number of elements and the number of those that are sent.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from commhooks.algorithms.sparse.index_code import IndexCode
from commhooks.algorithms.sparse.selection import scatter_add
from commhooks.codecs.finite import copy_if
from commhooks.comm.wire import all_gather_bytes
from commhooks.kernels import backend_of
from commhooks.kernels import sparse as kernels
from commhooks.precision import at_least_float32, fit
from reducer import GradBucket

__all__ = [
    "SparseLayout",
    "SparsePart",
    "gather_bytes",
    "kept_elements",
    "to_memory_dtype",
]


def to_memory_dtype(buffer: Tensor) -> Tensor:
    """The same tensor in float32 or float64; a copy where it is in half precision."""
    return buffer.to(at_least_float32(buffer.dtype))


def kept_elements(density: float, numel: int) -> int:
    """How many of a bucket's elements are sent: the nearest integer, but one if there is any."""
    return min(numel, max(1, round(density * numel)))


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

    def leave(self, total: Tensor, error: Tensor, verdict: Tensor) -> None:
        """``error`` becomes what is not sent of ``total``: sent + error == total, exactly.

        Only if the verdict is true. ``total`` loses what is sent.
        """
        scatter_add(-self.values.to(total.dtype), self.indices, total)
        copy_if(verdict, total, error)

    def dense(self, like: Tensor) -> Tensor:
        """With zeros for what is not sent."""
        out = torch.zeros_like(like)
        scatter_add(self.values.to(out.dtype), self.indices, out)
        return out


@dataclass(frozen=True)
class SparseLayout:
    """How a part of at most ``capacity`` out of ``numel`` elements is written."""

    numel: int
    capacity: int
    dtype: torch.dtype

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, numel: int, capacity: int, dtype: torch.dtype) -> "SparseLayout":
        """The same one each time, as it works things out."""
        return cls(numel, capacity, dtype)

    @cached_property
    def code(self) -> IndexCode:
        return IndexCode.shortest(self.numel, self.capacity)

    @cached_property
    def nbytes(self) -> int:
        return self.code.nbytes + self.capacity * self.dtype.itemsize

    def write(self, part: SparsePart) -> Tensor:
        """(nbytes,) uint8."""
        message = part.indices.new_zeros(self.nbytes, dtype=torch.uint8)
        if backend_of(message) is not None:
            kernels.pack(part.indices, part.values, self.code.for_kernels, message)
            return message
        index_bytes = self.code.nbytes
        self.code.pack(part.indices, out=message[:index_bytes])
        values = part.values.view(torch.uint8)
        message[index_bytes : index_bytes + values.numel()] = values
        return message

    def values(self, messages: Tensor) -> Tensor:
        """(..., capacity), a view of messages (..., nbytes)."""
        return messages[..., self.code.nbytes :].view(self.dtype)

    def read(self, message: Tensor, count: int) -> SparsePart:
        """On the CPU, a part of that many. The values are a view of ``message``."""
        indices = self.code.unpack(message[: self.code.nbytes], count)
        return SparsePart(indices, self.values(message)[:count])


def gather_bytes(bucket: GradBucket, density: float, size: int) -> int:
    """What each of ``size`` ranks sends when all gather that share of the elements."""
    buffer = bucket.buffer()
    count = kept_elements(density, buffer.numel())
    return all_gather_bytes(SparseLayout(buffer.numel(), count, buffer.dtype).nbytes, size)
