"""Launches of lowrank.cu: what low-rank compression needs beside products. Nothing synchronises.

Letters as in algorithms/lowrank.py. All tensors of numbers are float32 or float64, of one dtype.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.kernels.launcher import Argument, launch
from commhooks.kernels.selection import TYPES
from commhooks.kernels.source import Source

__all__ = ["MAX_RANK", "SOURCE", "Matrix", "MatrixKernels"]

MAX_RANK = 256
"""The most columns of a matrix that :meth:`MatrixKernels.orthonormalise` takes."""

SOURCE = Source(
    "lowrank.cu",
    tuple(
        f"commhooks::kernels::{kernel}<{type_}>"
        for kernel in ("orthonormalise", "send", "receive", "keep", "absorb")
        for type_ in TYPES.values()
    ),
)

_BASIS_THREADS = 512
_THREADS = 256
_ROWS = 4
_STREAMING_BLOCKS = 2048


class Matrix(NamedTuple):
    """One of a bucket: where its numbers are, in elements, and its shape. As in lowrank.cu."""

    gradient: int
    error: int
    left: int
    right: int
    rows: int
    columns: int
    rank: int


class MatrixKernels:
    """The kernels for the matrices of one bucket, of whatever shapes; each is one launch for all.

    ``like``: a tensor of the device and dtype to work in. Factors of one side are flat, those of
    all matrices; the bucket is flat, too, and so are its errors.
    """

    def __init__(self, matrices: Sequence[Matrix], like: Tensor) -> None:
        vector = 16 // like.itemsize
        self._blocks = 0
        rows = []
        for matrix in matrices:
            rows.append((self._blocks, *matrix))
            threads = -(-matrix.rows // _ROWS) * -(-matrix.columns // vector)
            self._blocks += -(-threads // _THREADS)
        shape = len(rows), 1 + len(Matrix._fields)
        table = torch.tensor(rows, dtype=torch.int64).view(shape)
        if like.is_cuda:
            table = table.pin_memory()  # or the host would wait for the copy
        self._table = table.to(like.device, non_blocking=True)
        self._count = len(rows)
        self._largest_rank = max((matrix.rank for matrix in matrices), default=0)
        self._largest = float(torch.finfo(like.dtype).max / 2**16)
        self._names = {
            name: f"commhooks::kernels::{name}<{TYPES[like.dtype]}>"
            for name in ("orthonormalise", "send", "receive", "keep", "absorb")
        }

    def orthonormalise(self, factors: Tensor, *, is_left: bool) -> Tensor:
        """Orthonormal bases of the columns of left factors, or of the rows of right ones.

        No more than :data:`MAX_RANK` of each.
        """
        basis = torch.empty_like(factors)
        arguments = (self._table, is_left, factors, basis)
        self._launch("orthonormalise", arguments, self._count, _BASIS_THREADS)
        return basis

    def send(self, own: Tensor, verdict: Tensor | None) -> Tensor:
        """A copy; NaN in both of numbers so large that products with them could overflow.

        ``verdict``, () bool, becomes true.
        """
        total = torch.empty_like(own)
        numel = own.numel()
        arguments = (own, numel, self._largest, total, verdict)
        self._launch("send", arguments, max(1, _streaming_blocks(own)), _THREADS)
        return total

    def receive(self, total: Tensor, ranks: int, verdict: Tensor) -> None:
        """The mean, in place of the sum; the verdict becomes false if it is not finite."""
        arguments = (total, total.numel(), ranks, verdict)
        self._launch("receive", arguments, _streaming_blocks(total), _THREADS)

    def keep(self, fresh: Tensor, kept: Tensor, verdict: Tensor, *, is_left: bool) -> None:
        """``kept`` takes over vectors of ``fresh``, not those of zeros, if the verdict is true."""
        arguments = (verdict, self._table, is_left, fresh, kept)
        self._launch("keep", arguments, (self._count, self._largest_rank, 1), _THREADS)

    def absorb(
        self,
        verdict: Tensor,
        errors: Tensor | None,
        bucket: Tensor,
        own: tuple[Tensor, Tensor],
        mean: tuple[Tensor, Tensor],
        halves: int,
    ) -> None:
        """E becomes E + G less the product of ``own``, and G the product of ``mean``, in one pass.

        These: left and right factors, those of ``halves`` half steps one after the other, whose
        products add up. If the verdict, () bool, is false: E stays as it is and G becomes NaN.
        """
        lefts, rights = (factors.numel() // halves for factors in own)
        arguments = (verdict, self._table, self._count, errors, bucket, halves, lefts, rights)
        self._launch("absorb", (*arguments, *own, *mean), self._blocks, _THREADS)

    def _launch(
        self,
        name: str,
        arguments: Sequence[Argument],
        grid: int | tuple[int, int, int],
        threads: int,
    ) -> None:
        launch(SOURCE, self._names[name], arguments, grid=grid, block=threads)


def _streaming_blocks(numbers: Tensor) -> int:
    return min(_STREAMING_BLOCKS, -(-numbers.nbytes // (16 * _THREADS)))
