"""The division of a bucket into matrices and parts that are sent uncompressed.

A plan depends on names, shapes, strides and options only, so all ranks make the same one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain

from torch import Tensor

RankRule = Callable[[int, int], int]
"""The rank r at which a matrix of n rows and m columns is compressed; 0 to send it uncompressed."""

_Shape = tuple[int, int, int]


class Side(IntEnum):
    """One of the two factors of a matrix, M ≈ P·Q."""

    LEFT = 0  # P: (n, r)
    RIGHT = 1  # Q: (r, m)

    @property
    def other(self) -> "Side":
        return Side.RIGHT if self is Side.LEFT else Side.LEFT


def matrix_shape(gradient: Tensor) -> tuple[int, int] | None:
    """Return (n, m) of the matrix that a gradient is compressed as, or None if it has none.

    n is the size of the dimension with the largest stride: the memory of a dense tensor then holds
    n rows of numel/n elements one after the other, whatever its layout. The weight of a convolution
    is thus (output channels, the rest), both row-major and channels_last, and is never copied into
    another order. Dimensions of size 1 have meaningless strides and do not count.
    """
    strides = zip(gradient.stride(), gradient.shape, strict=True)
    dims = [(stride, size) for stride, size in strides if size > 1]
    if len(dims) < 2 or gradient.numel() == 0:
        return None
    rows = max(dims)[1]
    return rows, gradient.numel() // rows


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape at equal distances in the bucket.

    Equal distances make them one strided tensor (k, n, m) of the bucket's own memory, which is
    multiplied as one batch and written without a copy. Repeated layers are laid out like that. Two
    matrices always are, so k matrices of one shape never make more than ⌈k/2⌉ batches.
    """

    offset: int  # of the first matrix in the bucket; in elements, as all lengths here
    spacing: int  # from one matrix to the next
    rows: int  # n
    columns: int  # m
    rank: int  # r
    keys: tuple[str, ...]  # under which the factors of each matrix are kept in the state

    @property
    def shape(self) -> _Shape:
        return len(self.keys), self.rows, self.columns

    def factor_shape(self, side: Side) -> _Shape:
        """Return (k, n, r) for the left side, (k, r, m) for the right side."""
        if side is Side.LEFT:
            return len(self.keys), self.rows, self.rank
        return len(self.keys), self.rank, self.columns


@dataclass(frozen=True)
class MatrixPlan:
    """The division of a bucket into matrices and ranges that are sent uncompressed.

    The factors of one side of all batches make one flat tensor, as do the errors of all batches.
    """

    batches: tuple[MatrixBatch, ...]
    exact: tuple[tuple[int, int], ...]  # (start, stop) of the ranges that are sent uncompressed
    error_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Key and shape of each part of the flat errors, in their order."""

    @classmethod
    def of_parameters(
        cls, names: Sequence[str], gradients: Sequence[Tensor], rank_of: RankRule
    ) -> "MatrixPlan":
        """Compress each gradient that is a matrix and has a rank; the gradients tile the bucket."""
        batches: dict[tuple[int, int], list[list[tuple[str, int]]]] = {}
        exact: list[tuple[int, int]] = []
        offset = 0
        for name, gradient in zip(names, gradients, strict=True):
            shape = matrix_shape(gradient)
            if shape is not None and rank_of(*shape) > 0:
                _append(batches.setdefault(shape, []), name, offset)
            else:
                exact.append((offset, offset + gradient.numel()))
            offset += gradient.numel()
        made = tuple(
            _batch(batch, n, m, rank_of(n, m))
            for (n, m), of_shape in batches.items()
            for batch in of_shape
        )
        errors = ((key, (batch.rows, batch.columns)) for batch in made for key in batch.keys)
        return cls(made, _merge(exact), tuple(errors))

    def gradients(self, buffer: Tensor) -> list[Tensor]:
        """Return the matrices of each batch in the flat ``buffer``, (k, n, m)."""
        first = buffer.storage_offset()
        return [
            buffer.as_strided(b.shape, (b.spacing, b.columns, 1), first + b.offset)
            for b in self.batches
        ]

    def errors(self, flat: Tensor) -> list[Tensor]:
        """Return the errors of each batch, (k, n, m)."""
        return _consecutive(flat, [batch.shape for batch in self.batches])

    def factors(self, side: Side, flat: Tensor) -> list[Tensor]:
        """Return the factors of each batch, (k, n, r) or (k, r, m)."""
        return _consecutive(flat, [batch.factor_shape(side) for batch in self.batches])

    def error_entries(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """Return all parts of the flat errors, with their keys."""
        views = _consecutive(flat, [shape for _, shape in self.error_shapes])
        return [(key, view) for (key, _), view in zip(self.error_shapes, views, strict=True)]

    def factor_entries(self, side: Side, flat: Tensor) -> list[tuple[str, Tensor]]:
        """Return the factor of each matrix, with its key."""
        keys = chain.from_iterable(batch.keys for batch in self.batches)
        return list(zip(keys, chain.from_iterable(self.factors(side, flat)), strict=True))

    def exact_parts(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the ranges of the flat ``buffer`` that are sent uncompressed."""
        return buffer.tensor_split(self._exact_ends)[1::2]

    def exact_parts_behind(self, side: Side, flat: Tensor) -> list[Tensor]:
        """Return the same ranges where they follow the factors of one side."""
        _, *parts = flat[: self.sent_elements(side, has_exact=True)].split_with_sizes(
            [self.factor_elements[side], *self._exact_sizes]
        )
        return parts

    def sent_elements(self, side: Side, *, has_exact: bool) -> int:
        """Count the factors of one side, and the exact ranges if these travel with them."""
        return self.factor_elements[side] + (self.exact_elements if has_exact else 0)

    @cached_property
    def factor_elements(self) -> list[int]:
        """By side."""
        return [sum(math.prod(batch.factor_shape(side)) for batch in self.batches) for side in Side]

    @cached_property
    def exact_elements(self) -> int:
        return sum(self._exact_sizes)

    @cached_property
    def _exact_sizes(self) -> list[int]:
        return [stop - start for start, stop in self.exact]

    @cached_property
    def _exact_ends(self) -> list[int]:
        return list(chain.from_iterable(self.exact))


def _consecutive(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views of these shapes, one behind the other, of the beginning of a flat tensor."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = flat[: sum(sizes)].split_with_sizes(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _append(batches: list[list[tuple[str, int]]], name: str, offset: int) -> None:
    """Add a matrix to the last batch if distances stay equal, else begin another one."""
    last = batches[-1] if batches else None
    if last and (len(last) == 1 or offset - last[-1][1] == last[1][1] - last[0][1]):
        last.append((name, offset))
    else:
        batches.append([(name, offset)])


def _batch(matrices: Sequence[tuple[str, int]], rows: int, columns: int, rank: int) -> MatrixBatch:
    names, offsets = zip(*matrices, strict=True)
    spacing = offsets[1] - offsets[0] if len(offsets) > 1 else rows * columns
    return MatrixBatch(offsets[0], spacing, rows, columns, rank, names)


def _merge(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join neighbors, drop empty ranges."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged)
