"""Launches of kernels/lowrank.cu for all matrices of a bucket. Nothing synchronizes.

Letters as in compressor.py. Errors and factors are float32 or float64, all of
one dtype; the bucket may also be in half precision.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.kernels.launcher import STREAMING_BLOCKS, blocks_for, launch, streaming_blocks
from commhooks.kernels.source import ELEMENTS, LOWRANK, LOWRANK_RANKS, TYPES, kernel_name

LEFT, RIGHT = 0, 1
"""Which of the factors of a matrix."""

MAX_RANK = 256
"""The highest rank that :meth:`MatrixKernels.orthonormalize` takes."""

_BASIS_THREADS = 512
_ROWS = 4
_SPANS = (1024, 64)  # columns that a sum for a left factor is over, rows for a right one
_MOST_SPANS = 128  # of a matrix, however long
_TALL = 4096  # rows of a factor, or columns, above which several blocks compute its basis
_KEPT_PER_BLOCK = 1024  # numbers of one vector that a block of `keep` copies,
_MOST_KEEPERS = 64  # unless so many blocks do not suffice


class Matrix(NamedTuple):
    """One matrix of a bucket: its shape, and where its numbers are, in elements.

    A matrix of rank 0 stands for a range that is sent uncompressed, in one row; these come last.
    """

    gradient: int
    error: int
    left: int
    right: int
    rows: int
    columns: int
    rank: int


class MatrixKernels:
    """The kernels for the matrices of one bucket, of whatever shapes.

    Each method is one launch, except :meth:`orthonormalize` if a factor is tall.

    ``bucket``: the bucket, flat. ``like``: a tensor of the dtype to work in. The factors of one
    ``side``, LEFT or RIGHT, of all matrices are one flat tensor, which the exact ranges may follow.
    """

    def __init__(self, matrices: Sequence[Matrix], bucket: Tensor, like: Tensor) -> None:
        self._all = len(matrices)
        self._count = sum(matrix.rank > 0 for matrix in matrices)
        self._largest_rank = max((matrix.rank for matrix in matrices), default=0)
        self._largest = float(torch.finfo(like.dtype).max / 2**16)
        highest = next(
            (rank for rank in LOWRANK_RANKS[like.dtype] if self._largest_rank <= rank), None
        )
        self.multiplies = highest is not None
        """Whether ranks are low enough for :meth:`project`."""
        self._vector = 16 // like.itemsize
        self._together = 32 // (highest or 32)
        self._factors = [0, 0]  # elements, by side
        self._further = [0, 0]  # elements of the sums over further spans, by side
        self._project_blocks = [[0, 0], [0, 0]]  # by side: for matrices, and with exact ranges
        self._blocks = 0
        rows = []
        for matrix in matrices:
            head = (self._blocks, matrix.gradient, matrix.error, *matrix[-3:])
            rows.append((*head, *self._factor(LEFT, matrix), *self._factor(RIGHT, matrix)))
            self._blocks += blocks_for(-(-matrix.rows // _ROWS) * self._vectors(matrix))
        self._table = _on_device(rows, like)
        self._bases = [_Bases(side, matrices[: self._count], like) for side in (LEFT, RIGHT)]
        self._type, self._element = TYPES[like.dtype], ELEMENTS[bucket.dtype]
        self._highest = highest or 0

    def _factor(self, side: int, matrix: Matrix) -> tuple[int, int, int, int]:
        """Return the struct Factor of lowrank.cu, and count the elements and blocks it needs."""
        blocks = self._project_blocks[side]
        start, first_block, further = matrix[2 + side], blocks[1], self._further[side]
        if matrix.rank == 0:
            blocks[1] += blocks_for(self._vectors(matrix))
            return start, first_block, 0, 0
        summed, length = matrix.columns, matrix.rows
        if side == RIGHT:
            summed, length = length, summed
        span = max(_SPANS[side], -(-summed // (32 * _MOST_SPANS)) * 32)  # of whole vectors
        spans = -(-summed // span)
        if side == LEFT:
            threads = 32 * -(-length // self._together) * spans
        else:
            threads = self._vectors(matrix) * spans
        self._factors[side] += matrix.rank * length
        self._further[side] += matrix.rank * length * (spans - 1)
        blocks[:] = 2 * [first_block + blocks_for(threads)]
        return start, first_block, span, further

    def _vectors(self, matrix: Matrix) -> int:
        return -(-matrix.columns // self._vector)

    def orthonormalize(self, side: int, factors: Tensor) -> Tensor:
        """Return orthonormal bases of the columns of each P, or of the rows of each Q.

        Ranks may not be above :data:`MAX_RANK`. If a factor is tall there are three launches, and
        vectors of its basis may have other signs than LAPACK's: Note [Tall factors].
        """
        where, name = self._bases[side], kernel_name("orthonormalize", self._type)
        basis = factors.new_empty(self._factors[side])
        work = torch.empty_like(basis)
        triangles = factors.new_empty(where.triangles)
        arguments = (where.panels, factors, work, triangles, basis)
        launch(LOWRANK, name, arguments, grid=len(where.panels), block=_BASIS_THREADS)
        if where.triangles > 0:
            stacks = (where.stacks, triangles, torch.empty_like(triangles), None, triangles)
            launch(LOWRANK, name, stacks, grid=len(where.stacks), block=_BASIS_THREADS)
            panels = (where.panels, work, triangles, basis)
            launch(
                LOWRANK,
                kernel_name("combine", self._type),
                panels,
                grid=len(where.panels),
                block=_BASIS_THREADS,
            )
        return basis

    def project(
        self, side: int, errors: Tensor | None, bucket: Tensor, basis: Tensor, sent: int
    ) -> Tensor:
        """Return the factors of M on one side, given those on the other side.

        ``sent``: how many elements are sent; the exact ranges follow the factors if that leaves
        room for them. Behind those are sums over further spans: Note [Tall and thin].
        """
        own = basis.new_empty(sent + self._further[side])
        has_exact = sent > self._factors[side]
        count = self._all if has_exact else self._count
        arguments = (self._table, count, errors, bucket, basis, sent, own)
        blocks = self._project_blocks[side][has_exact]
        name = "project_left" if side == LEFT else "project_right"
        kernel = kernel_name(name, self._type, self._element, self._highest)
        launch(LOWRANK, kernel, arguments, grid=blocks)
        return own

    def message(self, side: int, own: Tensor, sent: int, all_finite: Tensor | None) -> Tensor:
        """Complete ``own``, as :meth:`project` has left it, and return a copy of what is sent.

        In both, numbers so large that products with them could overflow become NaN.
        ``all_finite``, () bool, becomes true.
        """
        total = own.new_empty(sent)
        factors = self._factors[side] if own.numel() > sent else 0
        arguments = (self._table, self._count, side, factors, own, sent, self._largest, total)
        blocks = min(STREAMING_BLOCKS, max(1, blocks_for(sent)))
        launch(LOWRANK, kernel_name("message", self._type), (*arguments, all_finite), grid=blocks)
        return total

    def average(self, total: Tensor, ranks: int, all_finite: Tensor) -> None:
        """Turn a sum into the mean, in place; ``all_finite`` becomes false if it is not finite."""
        arguments = (total, total.numel(), ranks, all_finite)
        launch(LOWRANK, kernel_name("average", self._type), arguments, grid=streaming_blocks(total))

    def keep(self, side: int, fresh: Tensor, kept: Tensor, all_finite: Tensor) -> None:
        """Copy vectors of ``fresh``, except zeros, to ``kept`` if ``all_finite`` is true."""
        arguments = (all_finite, self._table, side, fresh, kept)
        parts = min(_MOST_KEEPERS, blocks_for(self._bases[side].longest, _KEPT_PER_BLOCK))
        launch(
            LOWRANK,
            kernel_name("keep", self._type),
            arguments,
            grid=(self._count, self._largest_rank, parts),
        )

    def apply(
        self,
        errors: Tensor | None,
        bucket: Tensor,
        own: Sequence[Sequence[Tensor]],
        mean: Sequence[Sequence[Tensor]],
        exact: tuple[Tensor, int],
        all_finite: Tensor,
    ) -> None:
        """Set E to E + G less the products of ``own``, and G to those of ``mean``, in one pass.

        ``own`` and ``mean``: by side, the factors of each half step, whose products add up.
        ``exact``: the mean of the exact ranges, behind factors of that side. If ``all_finite`` is
        false, E stays as it is and G becomes NaN.
        """
        factors = (
            self._concatenate(side, of[side]) for of in (own, mean) for side in (LEFT, RIGHT)
        )
        arguments = (all_finite, self._table, self._all, errors, bucket, len(own[LEFT]))
        launch(
            LOWRANK,
            kernel_name("apply", self._type, self._element),
            (*arguments, *self._factors, *factors, *exact),
            grid=self._blocks,
        )

    def _concatenate(self, side: int, factors: Sequence[Tensor]) -> Tensor:
        if len(factors) == 1:
            return factors[0]
        return torch.cat([flat[: self._factors[side]] for flat in factors])


class _Panel(NamedTuple):
    """The struct Panel of lowrank.cu."""

    start: int
    row_stride: int
    column_stride: int
    rows: int
    rank: int
    work: int
    triangle: int = -1


class _Bases:
    """Which panels :meth:`MatrixKernels.orthonormalize` divides the factors of a side into."""

    def __init__(self, side: int, matrices: Sequence[Matrix], like: Tensor) -> None:
        panels: list[_Panel] = []
        stacks: list[_Panel] = []
        self.longest = 0
        """Rows of the tallest factor."""
        self.triangles = 0
        """Elements of the triangles of all tall factors."""
        for matrix in matrices:
            rank, start = matrix.rank, matrix[2 + side]
            rows, strides = (
                (matrix.rows, (rank, 1)) if side == LEFT else (matrix.columns, (1, matrix.columns))
            )
            self.longest = max(rows, self.longest)
            if rows <= _TALL:
                panels.append(_Panel(start, *strides, rows, rank, start))
                continue
            parts = rows // math.isqrt(rows * rank)  # each has as many rows as columns, or more
            stacks.append(_Panel(self.triangles, rank, 1, parts * rank, rank, self.triangles))
            for part in range(parts):
                begin, end = (rows * i // parts for i in (part, part + 1))
                places = start + begin * rank, self.triangles
                panels.append(
                    _Panel(start + begin * strides[0], *strides, end - begin, rank, *places)
                )
                self.triangles += rank * rank
        self.panels = _on_device(panels, like)
        self.stacks = _on_device(stacks, like)


def _on_device(rows: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int64)
    if like.is_cuda:
        table = table.pin_memory()  # or the host would wait for the copy
    return table.to(like.device, non_blocking=True)
