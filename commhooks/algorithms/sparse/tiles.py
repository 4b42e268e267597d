"""The discrete cosine transform of parameters, tile by tile.

A parameter counts as a matrix: its first dimension, and all others together. A vector is one row.
Each side of a tile is the largest divisor of the matrix's side up to ``side``, so tiles fill the
matrix. The transform of a tile X is A·X·Bᵀ with the orthonormal matrices A and B of the DCT-II, so
it keeps lengths, and its inverse is Aᵀ·X·B.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["dct_matrix", "from_frequencies", "to_frequencies"]


def to_frequencies(tensors: Sequence[Tensor], side: int) -> Tensor:
    """Return the coefficients of all tensors, flat, one tile after the other."""
    parts = []
    for i, tiling in _tilings(tensors, side):
        tiles = tiling.cut(tensors[i])
        rows, columns = _matrices(tiling, tiles)
        parts.append((rows @ tiles @ columns.T).flatten())
    return torch.cat(parts) if parts else torch.cat([tensor.flatten() for tensor in tensors])


def from_frequencies(coefficients: Tensor, tensors: Sequence[Tensor], side: int) -> None:
    """Write what :func:`to_frequencies` has transformed into ``tensors``."""
    start = 0
    for i, tiling in _tilings(tensors, side):
        stop = start + tensors[i].numel()
        tiles = coefficients[start:stop].view(tiling.shape)
        rows, columns = _matrices(tiling, tiles)
        tensors[i].copy_(tiling.join(rows.T @ tiles @ columns).view(tensors[i].shape))
        start = stop


@dataclass(frozen=True)
class _Tiling:
    """How many rows and columns of tiles a matrix has, and the sides of a tile."""

    shape: tuple[int, int, int, int]

    @classmethod
    def of(cls, tensor: Tensor, side: int) -> "_Tiling":
        rows = len(tensor) if tensor.dim() > 1 else 1
        columns = tensor.numel() // rows
        height, width = _divisor(rows, side), _divisor(columns, side)
        return cls((rows // height, columns // width, height, width))

    @property
    def tile_elements(self) -> int:
        return self.shape[2] * self.shape[3]

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the tiles of a tensor, (rows, columns, height, width)."""
        rows, columns, height, width = self.shape
        return tensor.reshape(rows, height, columns, width).transpose(1, 2)

    def join(self, tiles: Tensor) -> Tensor:
        """Return the matrix of these tiles."""
        rows, columns, height, width = self.shape
        return tiles.transpose(1, 2).reshape(rows * height, columns * width)


def _tilings(tensors: Sequence[Tensor], side: int) -> Iterator[tuple[int, _Tiling]]:
    """Yield the number and the tiling of each tensor with elements, those with full tiles first.

    A chunk of ``side * side`` coefficients is then one tile, except among small ones.
    """
    tilings = [(i, _Tiling.of(t, side)) for i, t in enumerate(tensors) if t.numel() > 0]
    yield from sorted(tilings, key=lambda item: item[1].tile_elements < side * side)


def _matrices(tiling: _Tiling, tiles: Tensor) -> tuple[Tensor, Tensor]:
    *_, height, width = tiling.shape
    return tuple(dct_matrix(n, tiles.dtype, tiles.device) for n in (height, width))  # type: ignore[return-value]


@functools.lru_cache(maxsize=1024)
def _divisor(number: int, largest: int) -> int:
    """Return the largest divisor of ``number`` up to ``largest``."""
    return next(n for n in range(min(number, largest), 0, -1) if number % n == 0)


@functools.lru_cache(maxsize=256)
def dct_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal matrix of the DCT-II: row k is the cosine of frequency k."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    position = torch.arange(size, dtype=torch.float64) + 0.5
    cosines = torch.cos(math.pi / size * frequency * position) * math.sqrt(2 / size)
    cosines[0] /= math.sqrt(2)
    return cosines.to(device, dtype)
