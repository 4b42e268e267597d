"""The compressor on a GPU: launches of kernels/lowrank.cu for all matrices of a bucket.

Letters as in compressor.py. Errors and factors are float32 or float64, all of one dtype; the bucket
may also be in half precision. Nothing synchronizes.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commhooks.algorithms.lowrank.compressor import Compressor, HalfStep, factors_of
from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, Side
from commhooks.errors import CommHookError
from commhooks.hook.base import TensorState
from commhooks.kernels import kernel_backend_of, launch, require
from commhooks.kernels.launcher import STREAMING_BLOCKS, blocks_for, streaming_blocks
from commhooks.kernels.source import ELEMENTS, LOWRANK, LOWRANK_RANKS, TYPES, kernel_name

_MAX_RANK = 256  # of `orthonormalize`
_BASIS_THREADS = 512
_ROWS = 4
_SPANS = (1024, 64)  # columns that a sum for a left factor is over, rows for a right one
_MOST_SPANS = 128  # of a matrix, however long
_TALL = 4096  # rows of a factor, or columns, above which several blocks compute its basis
_KEPT_PER_BLOCK = 1024  # numbers of one vector that a block of `keep` copies,
_MOST_KEEPERS = 64  # unless so many blocks do not suffice


def make_compressor(
    plan: MatrixPlan, buffer: Tensor, state: TensorState, **options: Any
) -> Compressor:
    """Return a compressor of these arguments, one with kernels if they run on the device."""
    largest = max((batch.rank for batch in plan.batches), default=0)
    can_run = (
        kernel_backend_of(buffer) is not None and largest <= _MAX_RANK and _has_cupy(buffer.device)
    )
    return (KernelCompressor if can_run else Compressor)(plan, buffer, state, **options)


@cache
def _has_cupy(device: torch.device) -> bool:
    """Return whether kernels can run there; warn once if not."""
    try:
        require(device)
    except CommHookError as error:
        warnings.warn(f"low-rank compression goes through torch, slower: {error}", stacklevel=2)
        return False
    return True


class _Factor(NamedTuple):
    """The struct Factor of lowrank.cu."""

    start: int
    first_block: int
    span: int = 0
    further: int = 0


class _Matrix(NamedTuple):
    """The struct Matrix of lowrank.cu. Those of rank 0 are exact ranges, and come last."""

    first_block: int
    gradient: int
    error: int
    rows: int
    columns: int
    rank: int
    factors: Sequence[_Factor]


class _Step(NamedTuple):
    """The struct Step of lowrank.cu."""

    all_finite: Tensor
    matrices: Tensor
    matrix_count: int
    errors: Tensor | None
    bucket: Tensor
    halves: int
    left_apart: int
    right_apart: int
    own_left: Tensor
    own_right: Tensor
    mean_left: Tensor
    mean_right: Tensor
    exact: Tensor
    exact_side: Side


class KernelCompressor(Compressor):
    """A compressor whose methods are one launch each, for matrices of whatever shapes.

    If a factor is tall, :meth:`orthonormalize` takes three launches, and vectors of its basis may
    have other signs than LAPACK's: Note [Tall factors]. :meth:`project` leaves sums over further
    spans behind what is sent, which :meth:`message` adds up: Note [Tall and thin].
    """

    def __init__(
        self, plan: MatrixPlan, buffer: Tensor, state: TensorState, **options: Any
    ) -> None:
        super().__init__(plan, buffer, state, **options)
        like = self._like
        self._largest_rank = max((batch.rank for batch in plan.batches), default=0)
        # The ranks that a kernel for products is compiled for; None if they are too high for all.
        self._highest = next(
            (rank for rank in LOWRANK_RANKS[like.dtype] if self._largest_rank <= rank), None
        )
        self._vector = 16 // like.itemsize
        self._further = [0, 0]  # elements of the sums over further spans, by side
        self._project_blocks = [[0, 0], [0, 0]]  # by side: for matrices, and with exact ranges
        self._blocks = 0  # of `apply`
        matrices = list(self._matrices())
        self._all = len(matrices)
        self._count = sum(matrix.rank > 0 for matrix in matrices)
        rows = [(*each[:-1], *chain.from_iterable(each.factors)) for each in matrices]
        self._table = _on_device(rows, like)
        self._bases = [_Bases(side, matrices[: self._count], like) for side in Side]
        self._type, self._element = TYPES[like.dtype], ELEMENTS[buffer.dtype]

    def _matrices(self) -> Iterator[_Matrix]:
        """Yield those of all batches, and then the exact ranges."""
        error, starts = 0, [0, 0]
        for batch in self.plan.batches:
            shape = batch.rows, batch.columns, batch.rank
            for i in range(len(batch.keys)):
                yield self._matrix(batch.offset + i * batch.spacing, error, shape, starts)
                error += batch.rows * batch.columns
        for start, stop in self.plan.exact:
            yield self._matrix(start, 0, (1, stop - start, 0), starts)

    def _matrix(
        self, gradient: int, error: int, shape: tuple[int, int, int], starts: list[int]
    ) -> _Matrix:
        """Return a matrix with the next blocks; ``starts`` are those of its factors, by side."""
        rows, columns, rank = shape
        first_block, vectors = self._blocks, -(-columns // self._vector)
        self._blocks += blocks_for(-(-rows // _ROWS) * vectors)
        factors = []
        for side, summed, length in ((Side.LEFT, columns, rows), (Side.RIGHT, rows, columns)):
            blocks, further = self._project_blocks[side], self._further[side]
            if rank == 0:
                factors.append(_Factor(starts[side], blocks[1]))
                blocks[1] += blocks_for(vectors)
                starts[side] += columns
                continue
            span = max(_SPANS[side], -(-summed // (32 * _MOST_SPANS)) * 32)  # of whole vectors
            spans = -(-summed // span)
            together = 32 // (self._highest or 32)
            threads = 32 * -(-length // together) if side is Side.LEFT else vectors
            factors.append(_Factor(starts[side], blocks[1], span, further))
            self._further[side] += rank * length * (spans - 1)
            blocks[:] = 2 * [blocks[1] + blocks_for(threads * spans)]
            starts[side] += rank * length
        return _Matrix(first_block, gradient, error, rows, columns, rank, factors)

    def orthonormalize(self, side: Side, factors: Tensor) -> Tensor:
        where, name = self._bases[side], kernel_name("orthonormalize", self._type)
        basis = factors.new_empty(self.plan.factor_elements[side])
        work = torch.empty_like(basis)
        triangles = factors.new_empty(where.triangles)
        count, threads = len(where.panels), _BASIS_THREADS
        arguments = (where.panels, factors, work, triangles, basis)
        launch(LOWRANK, name, arguments, grid=count, block=threads)
        if where.triangles > 0:
            stacks = (where.stacks, triangles, torch.empty_like(triangles), None, triangles)
            launch(LOWRANK, name, stacks, grid=len(where.stacks), block=threads)
            panels = (where.panels, work, triangles, basis)
            name = kernel_name("combine", self._type)
            launch(LOWRANK, name, panels, grid=count, block=threads)
        return basis

    def project(self, side: Side, buffer: Tensor, basis: Tensor, *, has_exact: bool) -> Tensor:
        if self._highest is None:
            return super().project(side, buffer, basis, has_exact=has_exact)
        sent = self.plan.sent_elements(side, has_exact=has_exact)
        own = basis.new_empty(sent + self._further[side])
        count = self._all if has_exact else self._count
        arguments = (self._table, count, self.error, buffer, basis, sent, own)
        name = f"project_{side.name.lower()}"
        kernel = kernel_name(name, self._type, self._element, self._highest)
        launch(LOWRANK, kernel, arguments, grid=self._project_blocks[side][has_exact])
        return own

    def message(
        self, side: Side, own: Tensor, earlier: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        sent = self.plan.sent_elements(side, has_exact=earlier is None)
        total = own.new_empty(sent)
        fresh = own.new_empty((), dtype=torch.bool) if earlier is None else None  # becomes true
        factors = self.plan.factor_elements[side] if own.numel() > sent else 0
        largest = float(torch.finfo(own.dtype).max / 2**16)
        arguments = (self._table, self._count, side, factors, own, sent, largest, total, fresh)
        blocks = min(STREAMING_BLOCKS, max(1, blocks_for(sent)))
        launch(LOWRANK, kernel_name("message", self._type), arguments, grid=blocks)
        return total, fresh if earlier is None else earlier

    def average(self, total: Tensor, ranks: int, earlier: Tensor | None) -> Tensor:
        assert earlier is not None
        arguments = (total, total.numel(), ranks, earlier)
        kernel = kernel_name("average", self._type)
        launch(LOWRANK, kernel, arguments, grid=streaming_blocks(total))
        return earlier

    def apply(
        self, sent: Sequence[HalfStep], first: HalfStep, buffer: Tensor, all_finite: Tensor
    ) -> None:
        own_left, own_right, mean_left, mean_right = (
            self._concatenate(side, of_side) for side, of_side in factors_of(sent)
        )
        step = _Step(
            all_finite=all_finite,
            matrices=self._table,
            matrix_count=self._all,
            errors=self.error,
            bucket=buffer,
            halves=len(sent),
            left_apart=self.plan.factor_elements[Side.LEFT],
            right_apart=self.plan.factor_elements[Side.RIGHT],
            own_left=own_left,
            own_right=own_right,
            mean_left=mean_left,
            mean_right=mean_right,
            exact=first.mean,
            exact_side=first.side,
        )
        kernel = kernel_name("apply", self._type, self._element)
        launch(LOWRANK, kernel, step, grid=self._blocks)

    def store_factors(self, half: HalfStep, all_finite: Tensor) -> None:
        side = half.side
        arguments = (all_finite, self._table, side, half.mean, self.factors[side])
        parts = min(_MOST_KEEPERS, blocks_for(self._bases[side].longest, _KEPT_PER_BLOCK))
        grid = (self._count, self._largest_rank, parts)
        launch(LOWRANK, kernel_name("keep", self._type), arguments, grid=grid)

    def _concatenate(self, side: Side, factors: Sequence[Tensor]) -> Tensor:
        if len(factors) == 1:
            return factors[0]
        return torch.cat([flat[: self.plan.factor_elements[side]] for flat in factors])


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
    """Panels into which :meth:`KernelCompressor.orthonormalize` divides the factors of a side."""

    def __init__(self, side: Side, matrices: Sequence[_Matrix], like: Tensor) -> None:
        panels: list[_Panel] = []
        stacks: list[_Panel] = []
        self.longest = 0
        """Rows of the tallest factor."""
        self.triangles = 0
        """Elements of the triangles of all tall factors."""
        for matrix in matrices:
            rank, start = matrix.rank, matrix.factors[side].start
            is_left, rows = side is Side.LEFT, (matrix.rows, matrix.columns)[side]
            strides = (rank, 1) if is_left else (1, rows)
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
