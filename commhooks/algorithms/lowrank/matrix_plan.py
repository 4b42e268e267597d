"""Which parts of a bucket are compressed as matrices, and which are sent as they are.

Plans depend on names, shapes, strides and options only, so all ranks make the same one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain, pairwise

from torch import Tensor

from commhooks.algorithms.lowrank.bucket_shape import shape_of_bucket
from commhooks.algorithms.lowrank.matrix_shape import matrix_shape

__all__ = ["CompressionRule", "MatrixBatch", "MatrixPlan", "Piece", "Side"]


_Three = tuple[int, int, int]


class Side(Enum):
    """One of the two factors of a matrix, M ≈ P·Q."""

    LEFT = 0  # P: (n, r)
    RIGHT = 1  # Q: (r, m)

    @property
    def other(self) -> "Side":
        return Side.RIGHT if self is Side.LEFT else Side.LEFT


@dataclass(frozen=True)
class CompressionRule:
    """Decides whether sending factors instead of a matrix is worth it.

    A matrix is compressed when that divides what is sent for it by ``min_rate`` or more. Two-sided:
    r·(n + m) elements are sent for n·m; one-sided: r·n and r·m in turn, half of that on average.
    With more iterations, that many times as much.
    """

    rank: int
    min_rate: float
    two_sided: bool
    iterations: int = 1

    def rank_of(self, rows: int, columns: int) -> int:
        return min(self.rank, rows, columns)

    def accepts(self, rows: int, columns: int) -> bool:
        return 0 < self.rank_of(rows, columns) <= self.highest_rank(rows, columns)

    def highest_rank(self, rows: int, columns: int) -> int:
        """The highest that is worth it, at most min(n, m); 0 if none is."""
        half_steps = self.iterations * (2 if self.two_sided else 1)
        least = self.min_rate * (rows + columns) * half_steps / 2  # elements, to be worth rank 1
        worth = int(rows * columns // least) if least else math.inf
        return int(min(rows, columns, worth))


@dataclass(frozen=True)
class Piece:
    """The elements ``start:stop`` of a flat tensor, in ``shape``, belong to ``key``."""

    key: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape that lie at equal distances in the bucket.

    Equal distances make them one strided tensor (k, n, m) of the bucket's own memory, which is
    multiplied as one batch and written back without a copy. Repeated layers are laid out like that;
    two matrices always are, so k matrices of a shape never make more than ⌈k/2⌉ batches.
    """

    offset: int  # of the first matrix in the bucket, in elements, like all lengths here
    spacing: int  # from one matrix to the next
    rows: int  # n
    columns: int  # m
    rank: int  # r
    factor_keys: tuple[str, ...]  # whose factors these are: one key for each matrix
    error_pieces: tuple[Piece, ...]  # whose error is where in the flat error memory

    @property
    def count(self) -> int:
        return len(self.factor_keys)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, self.rows, self.columns

    def factor_shape(self, side: Side) -> tuple[int, int, int]:
        """(k, n, r) on the left, (k, r, m) on the right."""
        if side is Side.LEFT:
            return self.count, self.rows, self.rank
        return self.count, self.rank, self.columns

    def factor_pieces(self, side: Side) -> tuple[Piece, ...]:
        shape = self.factor_shape(side)[1:]
        size = math.prod(shape)
        return tuple(
            Piece(key, i * size, (i + 1) * size, shape) for i, key in enumerate(self.factor_keys)
        )


@dataclass(frozen=True)
class MatrixPlan:
    """A bucket, cut into matrices and ranges ``(start, stop)`` that are sent as they are."""

    batches: tuple[MatrixBatch, ...]
    exact: tuple[tuple[int, int], ...]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The matrices of each batch inside the flat ``buffer``, (k, n, m)."""
        first = buffer.storage_offset()
        return [
            buffer.as_strided(shape, strides, first + start)
            for shape, strides, start in self._matrix_places
        ]

    def exact_parts(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """What of the flat ``buffer`` is sent as it is."""
        *sizes, end = self._cuts
        return buffer.split_with_sizes([*sizes, buffer.numel() - end])[1::2]

    @cached_property
    def exact_elements(self) -> int:
        return sum(self.exact_sizes)

    @cached_property
    def _matrix_places(self) -> "list[tuple[_Three, _Three, int]]":
        """Shape, strides and start of the matrices of each batch."""
        return [
            (batch.shape, (batch.spacing, batch.columns, 1), batch.offset) for batch in self.batches
        ]

    @cached_property
    def exact_sizes(self) -> list[int]:
        return [stop - start for start, stop in self.exact]

    @cached_property
    def _cuts(self) -> list[int]:
        """Sizes of what lies before each exact range, and of that, in turn; the end of the last."""
        ends = [0, *chain.from_iterable(self.exact)]
        return [*(end - start for start, end in pairwise(ends)), ends[-1]]

    @cached_property
    def factor_shapes(self) -> dict[Side, list[tuple[int, int, int]]]:
        """Of each batch."""
        return {side: [batch.factor_shape(side) for batch in self.batches] for side in Side}

    @cached_property
    def factor_places(self) -> "dict[Side, list[tuple[_Three, _Three, int]]]":
        """Shape, strides and start of each batch's factors, one after the other."""
        places: dict[Side, list[tuple[_Three, _Three, int]]] = {}
        for side, shapes in self.factor_shapes.items():
            starts = accumulate((math.prod(shape) for shape in shapes), initial=0)
            places[side] = [
                ((k, i, j), (i * j, j, 1), start)
                for (k, i, j), start in zip(shapes, starts, strict=False)
            ]
        return places

    def factor_elements(self, side: Side) -> int:
        return self._factor_elements[side]

    def sent_elements(self, side: Side, *, has_exact: bool) -> int:
        """Of all factors, and of the exact ranges if they travel with them."""
        return self._factor_elements[side] + (self.exact_elements if has_exact else 0)

    @cached_property
    def _factor_elements(self) -> dict[Side, int]:
        return {side: sum(map(math.prod, self.factor_shapes[side])) for side in Side}

    @classmethod
    def of_parameters(
        cls, names: Sequence[str], gradients: Sequence[Tensor], rule: CompressionRule
    ) -> "MatrixPlan":
        """One matrix for each gradient that ``rule`` accepts; the gradients tile the bucket."""
        runs: dict[tuple[int, int], list[list[tuple[str, int]]]] = {}
        exact: list[tuple[int, int]] = []
        offset = 0
        for name, gradient in zip(names, gradients, strict=True):
            shape = matrix_shape(gradient)
            if shape is not None and rule.accepts(*shape):
                _append_to_run(runs.setdefault(shape, []), name, offset)
            else:
                exact.append((offset, offset + gradient.numel()))
            offset += gradient.numel()
        batches = (
            _batch_of_run(run, *shape, rule.rank_of(*shape))
            for shape, runs_of_shape in runs.items()
            for run in runs_of_shape
        )
        return cls(tuple(batches), _merge(exact))

    @classmethod
    def of_bucket(
        cls, key: str, names: Sequence[str], gradients: Sequence[Tensor], rule: CompressionRule
    ) -> "MatrixPlan":
        """The whole bucket as one matrix, nearly square; the rest exact.

        Fewer than m of the N elements are left over. Sending these as they are costs no more than
        the row of zeros that would make room for them, and no copy.
        """
        lengths = [gradient.numel() for gradient in gradients]
        numel = sum(lengths)
        rows, columns = shape_of_bucket(gradients)
        if not rule.accepts(rows, columns):
            return cls((), _merge([(0, numel)]))
        pieces: list[Piece] = []
        for name, length in zip(names, lengths, strict=True):
            start = pieces[-1].stop if pieces else 0
            pieces.append(Piece(name, start, start + length, (length,)))
        rank = rule.rank_of(rows, columns)
        batch = MatrixBatch(0, rows * columns, rows, columns, rank, (key,), tuple(pieces))
        return cls((batch,), _merge([(rows * columns, numel)]))


def _append_to_run(runs: list[list[tuple[str, int]]], name: str, offset: int) -> None:
    """Adds a matrix to the last run if that keeps its distances equal, else begins a new one."""
    last = runs[-1] if runs else None
    if last and (len(last) == 1 or offset - last[-1][1] == last[1][1] - last[0][1]):
        last.append((name, offset))
    else:
        runs.append([(name, offset)])


def _batch_of_run(
    run: Sequence[tuple[str, int]], rows: int, columns: int, rank: int
) -> MatrixBatch:
    names = tuple(name for name, _ in run)
    offsets = [offset for _, offset in run]
    size = rows * columns
    return MatrixBatch(
        offset=offsets[0],
        spacing=offsets[1] - offsets[0] if len(run) > 1 else size,
        rows=rows,
        columns=columns,
        rank=rank,
        factor_keys=names,
        error_pieces=tuple(
            Piece(name, i * size, (i + 1) * size, (rows, columns)) for i, name in enumerate(names)
        ),
    )


def _merge(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Joins neighbors, drops what is empty."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged)
