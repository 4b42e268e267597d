"""Ascending indices in close to as few bits as possible.

Note [Index code]
~~~~~~~~~~~~~~~~~
Each of k ascending indices below n has an ordinal r, the number of smaller ones. It is split into
its l low bits and the remaining high bits:

    high   a bitmap; the index with ordinal r sets bit (index >> l) + r
    low    the l low bits of each index, one after the other

This is the code of Elias (1974) and Fano (1971). Adding r gives indices with equal high bits
different positions, and the reader of the bitmap knows r. The code takes n/2^l + k + k·l bits; with
the best l that is less than 2 + log2(n/k) per index, and no code takes less than log2(n/k) on
average. If more than about a quarter of all indices is present, a plain bitmap is shorter: l = 0,
and r is not added.

The bitmap and the low bits are little-endian words of 64 bits. The best l follows from n and k, so
a message does not describe its format.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter

import torch
from torch import Tensor

from commhooks import native
from commhooks.errors import CommHookError

_WORD_BITS = 64


@dataclass(frozen=True)
class IndexCode:
    """The code for at most ``count`` ascending int32 indices below ``numel``: Note [Index code]."""

    numel: int
    count: int
    low_bits: int
    adds_ordinal: bool

    @classmethod
    @lru_cache(maxsize=1024)
    def shortest(
        cls, numel: int, count: int, size: Callable[["IndexCode"], int] = attrgetter("nbytes")
    ) -> "IndexCode":
        """Return the code of the least ``size``. The bytes never decrease with ``count``."""
        plain = cls(numel, count, low_bits=0, adds_ordinal=False)
        bits = range(max(numel, 1).bit_length())
        codes = [plain, *(cls(numel, count, low_bits, adds_ordinal=True) for low_bits in bits)]
        return min(codes, key=size)

    @cached_property
    def high_bits(self) -> int:
        """The length of the bitmap."""
        if self.count == 0:
            return 0
        return ((self.numel - 1) >> self.low_bits) + self.count if self.adds_ordinal else self.numel

    @cached_property
    def nbytes(self) -> int:
        """The size of ``count`` packed indices."""
        return self._nbytes_of(self.count)

    def pack(self, indices: Tensor, out: Tensor) -> None:
        """Write at most ``count`` int32 indices into ``out``, (nbytes,) uint8, which holds zeros.

        Both are on the CPU.
        """
        form = (self.high_bits, self.low_bits, self.adds_ordinal)
        native.pack_indices(indices, *form, self._used(out, indices))

    def unpack(self, packed: Tensor, count: int | None = None) -> Tensor:
        """Return the indices, (count,) int32, on the CPU.

        ``count`` is how many indices were packed, by default :attr:`count`.

        Raises:
            RuntimeError: ``packed`` does not hold that many ascending indices below ``numel``.
        """
        indices = packed.new_empty(self.count if count is None else count, dtype=torch.int32)
        form = (self.high_bits, self.low_bits, self.adds_ordinal)
        native.unpack_indices(self._used(packed, indices), *form, self.numel, indices)
        return indices

    def _used(self, packed: Tensor, indices: Tensor) -> Tensor:
        """Return the bytes that hold these indices. Raises CommHookError if they do not fit."""
        used = self._nbytes_of(indices.numel())
        for tensor, dtype in ((indices, torch.int32), (packed, torch.uint8)):
            if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise CommHookError(f"expected flat {dtype}, found {tensor.dtype}")
        if packed.numel() < used:
            raise CommHookError(
                f"expected {used} bytes for {indices.numel()} packed indices, found "
                f"{packed.numel()}"
            )
        return packed[:used]

    def _nbytes_of(self, count: int) -> int:
        """Return the size of the whole bitmap and the low bits of ``count`` indices."""
        words = words_of(self.high_bits) + words_of(count * self.low_bits)
        return words * _WORD_BITS // 8


def words_of(bits: int) -> int:
    """Return how many words of 64 bits these bits take."""
    return -(-bits // _WORD_BITS)
