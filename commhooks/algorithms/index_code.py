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
from functools import lru_cache

import torch
from torch import Tensor

from reducer import _C

__all__ = ["IndexCode"]

_WORD_BITS = 64


@dataclass(frozen=True)
class IndexCode:
    """The code for ``count`` ascending int32 indices below ``numel``. See Note [Index code]."""

    numel: int
    count: int
    low_bits: int
    adds_rank: bool

    @classmethod
    def shortest(cls, numel: int, count: int) -> "IndexCode":
        """The code with the fewest bytes; with more indices these never become less."""
        return _shortest(numel, count)

    @property
    def high_bits(self) -> int:
        """The length of the bitmap."""
        if self.count == 0:
            return 0
        return ((self.numel - 1) >> self.low_bits) + self.count if self.adds_rank else self.numel

    @property
    def nbytes(self) -> int:
        words = _words(self.high_bits) + _words(self.count * self.low_bits)
        return words * _WORD_BITS // 8

    def pack(self, indices: Tensor, out: Tensor) -> None:
        """Writes (count,) int32 into (nbytes,) uint8."""
        if out.device.type == "cpu":
            _C.pack_indices(indices, self.high_bits, self.low_bits, self.adds_rank, out)
        else:
            self._pack_anywhere(indices, out)

    def unpack(self, packed: Tensor) -> Tensor:
        """The indices, (count,) int32. Raises RuntimeError where ``packed`` holds none such."""
        if packed.device.type != "cpu":
            return self._unpack_anywhere(packed)
        indices = packed.new_empty(self.count, dtype=torch.int32)
        _C.unpack_indices(
            packed, self.high_bits, self.low_bits, self.adds_rank, self.numel, indices
        )
        return indices

    def _pack_anywhere(self, indices: Tensor, out: Tensor) -> None:
        """By torch's operations, for other devices."""
        index = indices.long()
        positions = index >> self.low_bits
        if self.adds_rank:
            positions += torch.arange(self.count, device=index.device)
        bits = out.new_zeros(out.numel() * 8)
        bits[positions] = 1
        low = (index[:, None] >> _range(self.low_bits, index)) & 1
        bits[self._low_start :][: low.numel()] = low.view(-1).to(bits.dtype)
        torch.sum(bits.view(-1, 8) << _range(8, bits), dim=1, dtype=out.dtype, out=out)

    def _unpack_anywhere(self, packed: Tensor) -> Tensor:
        bits = ((packed[:, None] >> _range(8, packed)) & 1).view(-1)
        high = torch.nonzero_static(bits[: self._low_start], size=self.count).view(-1)
        if self.adds_rank:
            high -= torch.arange(self.count, device=high.device)
        low = bits[self._low_start :][: self.count * self.low_bits].long()
        low = (low.view(self.count, self.low_bits) << _range(self.low_bits, high)).sum(1)
        indices: Tensor = (high << self.low_bits) | low
        return indices.int()

    @property
    def _low_start(self) -> int:
        return _words(self.high_bits) * _WORD_BITS


@lru_cache(maxsize=1024)
def _shortest(numel: int, count: int) -> IndexCode:
    return min(_codes(numel, count), key=lambda code: code.nbytes)


def _codes(numel: int, count: int) -> Iterator[IndexCode]:
    yield IndexCode(numel, count, 0, adds_rank=False)
    for low_bits in range(max(numel, 1).bit_length()):
        yield IndexCode(numel, count, low_bits, adds_rank=True)


def _words(bits: int) -> int:
    return -(-bits // _WORD_BITS)


def _range(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device, dtype=like.dtype)
