"""How the indices of a sparse gradient are written, close to as short as can be.

Note [Index code]
~~~~~~~~~~~~~~~~~
k ascending indices below n, cut into l low bits and the rest:

    high   a bitmap; the index that r smaller ones precede sets bit (index >> l) + r
    low    the l low bits of each index, one after the other

This is the code of Elias (1974) and Fano (1971). Adding r keeps apart indices with equal high bits,
and r is known again when the bitmap is read. It takes n/2^l + k + k·l bits; with the best l that is
less than 2 + log2(n/k) per index, where no code can do with less than log2(n/k) on average. Where
more than about a quarter of all indices is there, a plain bitmap is shorter: l = 0, and no r.

Bitmap and low bits are little-endian words of 64 bits. n and k alone decide which l is the best, so
nothing about the format needs to be sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from commhooks.kernels import backend_of
from commhooks.kernels import sparse as kernels
from reducer import _C

__all__ = ["IndexCode"]

_WORD_BITS = 64


@dataclass(frozen=True)
class IndexCode:
    """The code for at most ``count`` ascending int32 indices below ``numel``: Note [Index code]."""

    numel: int
    count: int
    low_bits: int
    adds_rank: bool

    @classmethod
    def shortest(cls, numel: int, count: int) -> "IndexCode":
        """The code with the fewest bytes; with more indices these never become less."""
        return _shortest(numel, count)

    @cached_property
    def high_bits(self) -> int:
        """The length of the bitmap."""
        if self.count == 0:
            return 0
        return ((self.numel - 1) >> self.low_bits) + self.count if self.adds_rank else self.numel

    @cached_property
    def nbytes(self) -> int:
        return self._nbytes_of(self.count)

    @cached_property
    def for_kernels(self) -> kernels.Code:
        return kernels.Code(self.high_bits, self.low_bits, self.adds_rank, self.nbytes)

    def pack(self, indices: Tensor, out: Tensor) -> None:
        """Writes at most ``count`` int32 indices into (nbytes,) uint8, which are zeros.

        Does not wait for the device.
        """
        if backend_of(out) is None:
            used = self._nbytes_of(indices.numel())
            _C.pack_indices(indices, self.high_bits, self.low_bits, self.adds_rank, out[:used])
        else:
            kernels.pack(indices, None, self.for_kernels, out)

    def unpack(self, packed: Tensor, count: int | None = None) -> Tensor:
        """The indices on the CPU, (count,) int32; ``count``: how many were packed, if not all.

        Raises RuntimeError where ``packed`` holds none such.
        """
        indices = packed.new_empty(self.count if count is None else count, dtype=torch.int32)
        packed = packed[: self._nbytes_of(indices.numel())]
        _C.unpack_indices(
            packed, self.high_bits, self.low_bits, self.adds_rank, self.numel, indices
        )
        return indices

    def _nbytes_of(self, count: int) -> int:
        """With the bits of the bitmap for all, and low bits for so many."""
        words = _words(self.high_bits) + _words(count * self.low_bits)
        return words * _WORD_BITS // 8


@lru_cache(maxsize=1024)
def _shortest(numel: int, count: int) -> IndexCode:
    return min(_codes(numel, count), key=lambda code: code.nbytes)


def _codes(numel: int, count: int) -> Iterator[IndexCode]:
    yield IndexCode(numel, count, 0, adds_rank=False)
    for low_bits in range(max(numel, 1).bit_length()):
        yield IndexCode(numel, count, low_bits, adds_rank=True)


def _words(bits: int) -> int:
    return -(-bits // _WORD_BITS)
