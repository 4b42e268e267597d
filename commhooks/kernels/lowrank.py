"""Launches of lowrank.cu: low-rank compression of all matrices of a bucket. Nothing synchronizes.

Letters as in algorithms/lowrank/products.py. Tensors of numbers are float32 or float64, of one
dtype, but
for the bucket, which may also be in half precision.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.kernels.elements import ELEMENTS, TYPES
from commhooks.kernels.launcher import Argument, launch
from commhooks.kernels.source import Source
from commhooks.precision import at_least_float32

__all__ = ["LEFT", "MAX_RANK", "RIGHT", "SOURCE", "Matrix", "MatrixKernels"]

LEFT, RIGHT = 0, 1
"""Which of the factors of a matrix."""

MAX_RANK = 256
"""The most columns of a matrix that :meth:`MatrixKernels.orthonormalize` takes."""

_PROJECT = ("project_left", "project_right")
_RANKS = {  # that kernels take, at most; above, products are torch's
    torch.float32: (8, 16),
    torch.float64: (16,),
}


def _kernel(name: str, *arguments: str | int) -> str:
    return f"commhooks::kernels::{name}<{', '.join(map(str, arguments))}>"


SOURCE = Source(
    "lowrank.cu",
    (
        *(
            _kernel(name, type_)
            for name in ("orthonormalize", "send", "receive", "keep")
            for type_ in TYPES.values()
        ),
        *(
            kernel
            for dtype, element in ELEMENTS.items()
            for kernel in (
                _kernel("absorb", TYPES[at_least_float32(dtype)], element),
                *(
                    _kernel(name, TYPES[at_least_float32(dtype)], element, most)
                    for name in _PROJECT
                    for most in _RANKS[at_least_float32(dtype)]
                ),
            )
        ),
    ),
)

_BASIS_THREADS = 512
_THREADS = 256
_ROWS = 4
_SPANS = (1024, 64)  # columns that a sum for a left factor is over, rows for a right one
_MOST_SPANS = 128  # of a matrix, however long
_STREAMING_BLOCKS = 2048


class Matrix(NamedTuple):
    """One of a bucket: its shape, and where its numbers are, in elements. As in lowrank.cu.

    Of rank 0: numbers that are sent as they are, in one row, after all others.
    """

    gradient: int
    error: int
    left: int
    right: int
    rows: int
    columns: int
    rank: int


class MatrixKernels:
    """The kernels for the matrices of one bucket, of whatever shapes; each is one launch for all.

    ``like``: a tensor of the dtype to work in; ``bucket``: the bucket, flat. Factors of one side
    are flat, those of all matrices, and what is sent as it is comes behind them. A ``side`` is
    LEFT or RIGHT.
    """

    def __init__(self, matrices: Sequence[Matrix], bucket: Tensor, like: Tensor) -> None:
        self._all = len(matrices)
        self._count = sum(matrix.rank > 0 for matrix in matrices)
        self._largest_rank = max((matrix.rank for matrix in matrices), default=0)
        self._largest = float(torch.finfo(like.dtype).max / 2**16)
        most = next((most for most in _RANKS[like.dtype] if self._largest_rank <= most), None)
        self.multiplies = most is not None
        """Whether ranks are low enough for :meth:`project`."""
        self._vector = 16 // like.itemsize
        self._together = 32 // (most or 32)
        self._factors = [0, 0]
        self.spare = [0, 0]
        """For each side, what :meth:`project` needs behind what is sent, in elements."""
        self._project_blocks = [[0, 0], [0, 0]]  # by side: for matrices, and for all
        self._blocks = 0
        rows = []
        for matrix in matrices:
            head = (self._blocks, matrix.gradient, matrix.error, *matrix[-3:])
            rows.append((*head, *self._cut(LEFT, matrix), *self._cut(RIGHT, matrix)))
            self._blocks += _blocks(-(-matrix.rows // _ROWS) * self._vectors(matrix))
        table = torch.tensor(rows, dtype=torch.int64)
        if like.is_cuda:
            table = table.pin_memory()  # or the host would wait for the copy
        self._table = table.to(like.device, non_blocking=True)
        type_, element = TYPES[like.dtype], ELEMENTS[bucket.dtype]
        self._names = {
            name: _kernel(name, type_) for name in ("orthonormalize", "send", "receive", "keep")
        }
        self._names["absorb"] = _kernel("absorb", type_, element)
        self._project = [_kernel(name, type_, element, most or 0) for name in _PROJECT]

    def _cut(self, side: int, matrix: Matrix) -> tuple[int, int, int, int]:
        """The struct Factor of lowrank.cu, of which it counts what it needs."""
        blocks = self._project_blocks[side]
        start, first_block, further = (matrix.left, matrix.right)[side], blocks[1], self.spare[side]
        if matrix.rank == 0:
            blocks[1] += _blocks(self._vectors(matrix))
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
        self.spare[side] += matrix.rank * length * (spans - 1)
        blocks[:] = 2 * [first_block + _blocks(threads)]
        return start, first_block, span, further

    def _vectors(self, matrix: Matrix) -> int:
        return -(-matrix.columns // self._vector)

    def orthonormalize(self, side: int, factors: Tensor) -> Tensor:
        """Orthonormal bases of the columns of left factors, or of the rows of right ones.

        No more than :data:`MAX_RANK` of each.
        """
        basis = factors.new_empty(self._factors[side])
        arguments = (self._table, side, factors, basis)
        self._launch("orthonormalize", arguments, self._count, _BASIS_THREADS)
        return basis

    def project(
        self,
        side: int,
        errors: Tensor | None,
        bucket: Tensor,
        basis: Tensor,
        sent: int,
        own: Tensor,
    ) -> None:
        """Writes the factors of M on ``side``, given those on the other side, into ``own``.

        All ``sent`` numbers: those sent as they are as well, if there is room for them. Sums over
        further spans go behind, where there are :attr:`spare` elements: Note [Tall and thin].
        """
        has_exact = sent > self._factors[side]
        count = self._all if has_exact else self._count
        arguments = (self._table, count, errors, bucket, basis, sent, own)
        blocks = self._project_blocks[side][has_exact]
        launch(SOURCE, self._project[side], arguments, grid=blocks, block=_THREADS)

    def send(self, side: int, own: Tensor, sent: int, verdict: Tensor | None) -> Tensor:
        """Completes ``own``, as :meth:`project` has left it; returns a copy of what is sent.

        NaN in both of numbers so large that products with them could overflow. ``verdict``, ()
        bool, becomes true.
        """
        total = own.new_empty(sent)
        factors = self._factors[side] if own.numel() > sent else 0
        arguments = (self._table, self._count, side, factors, own, sent, self._largest, total)
        blocks = min(_STREAMING_BLOCKS, max(1, -(-sent // _THREADS)))
        self._launch("send", (*arguments, verdict), blocks, _THREADS)
        return total

    def receive(self, total: Tensor, ranks: int, verdict: Tensor) -> None:
        """The mean, in place of the sum; the verdict becomes false if it is not finite."""
        arguments = (total, total.numel(), ranks, verdict)
        blocks = min(_STREAMING_BLOCKS, -(-total.nbytes // (16 * _THREADS)))
        self._launch("receive", arguments, blocks, _THREADS)

    def keep(self, side: int, fresh: Tensor, kept: Tensor, verdict: Tensor) -> None:
        """``kept`` takes over vectors of ``fresh``, not those of zeros, if the verdict is true."""
        arguments = (verdict, self._table, side, fresh, kept)
        self._launch("keep", arguments, (self._count, self._largest_rank, 1), _THREADS)

    def absorb(
        self,
        verdict: Tensor,
        errors: Tensor | None,
        bucket: Tensor,
        own: tuple[Tensor, Tensor],
        mean: tuple[Tensor, Tensor],
        halves: int,
        exact: tuple[Tensor, int],
    ) -> None:
        """E becomes E + G less the product of ``own``, and G the product of ``mean``, in one pass.

        These: left and right factors, those of ``halves`` half steps one after the other, whose
        products add up. ``exact``: the mean of what was sent as it was, beside factors of that
        side. If the verdict, () bool, is false: E stays as it is and G becomes NaN.
        """
        factors: tuple[Argument, ...] = (halves, *self._factors, *own, *mean, *exact)
        arguments = (verdict, self._table, self._all, errors, bucket, *factors)
        self._launch("absorb", arguments, self._blocks, _THREADS)

    def _launch(
        self,
        name: str,
        arguments: tuple[Argument, ...],
        grid: int | tuple[int, int, int],
        threads: int,
    ) -> None:
        launch(SOURCE, self._names[name], arguments, grid=grid, block=threads)


def _blocks(threads: int) -> int:
    return -(-threads // _THREADS)
