"""Counter-based random numbers, as in kernels/codecs/random.h."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BlockRandom", "Floats", "Words", "random_bits"]

Words: TypeAlias = npt.NDArray[np.uint32]
Floats: TypeAlias = npt.NDArray[np.float32]

_GOLDEN = np.uint32(0x9E3779B1)
_32 = np.uint64(32)
_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)


def random_bits(indices: Words, low: Any, high: Any) -> Words:
    """Return 32 random bits per index for the seed whose words are ``low`` and ``high``."""
    bits = indices * _GOLDEN
    bits += low
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(0x85EBCA6B)
    bits ^= high
    bits ^= bits >> np.uint32(13)
    bits *= np.uint32(0xC2B2AE35)
    bits ^= bits >> np.uint32(16)
    return bits


class BlockRandom:
    """The random numbers of several blocks, in the shape (blocks, block_size).

    ``first`` is the index of the first number of the first block.
    """

    def __init__(self, seed: int, first: int, blocks: int, block_size: int) -> None:
        self._seed = seed
        self._first = first
        self._shape = blocks, block_size

    def bits(self) -> Words:
        """Return 32 bits per number."""
        indices, seeds = self._indices_and_seeds()
        return random_bits(indices, seeds.astype(np.uint32), (seeds >> _32).astype(np.uint32))

    def coins(self) -> Words:
        """Return 0 or 1 per number."""
        indices, seeds = self._indices_and_seeds()
        coins: Words = (indices * _GOLDEN + seeds.astype(np.uint32)) >> np.uint32(31)
        return coins

    def uniform(self) -> Floats:
        """Return a multiple of 2^-24 in [0, 1) per number."""
        return (self.bits() >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)

    def _indices_and_seeds(self) -> tuple[Words, npt.NDArray[np.uint64]]:
        """Return the lower words of all indices, and the seed of each block, (blocks, 1)."""
        blocks, block_size = self._shape
        starts = np.arange(blocks, dtype=np.uint64)[:, None] * np.uint64(block_size)
        starts += np.uint64(self._first)
        seeds = (starts >> _32) * _GOLDEN_64 + np.uint64(self._seed % 2**64)
        offsets = np.arange(block_size, dtype=np.uint32)
        return np.add(starts.astype(np.uint32), offsets, dtype=np.uint32), seeds
