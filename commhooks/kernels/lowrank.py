"""Launches of lowrank.cu: what low-rank compression needs beside products. Nothing synchronises.

Letters as in algorithms/lowrank.py. All tensors are float32 or float64, of one dtype.
"""

from torch import Tensor

from commhooks.kernels.launcher import launch
from commhooks.kernels.selection import TYPES
from commhooks.kernels.source import Source

__all__ = ["MAX_RANK", "SOURCE", "absorb", "orthonormalise"]

MAX_RANK = 256
"""The most columns of a matrix that :func:`orthonormalise` takes."""

SOURCE = Source(
    "lowrank.cu",
    tuple(
        f"commhooks::kernels::{kernel}<{type_}>"
        for kernel in ("orthonormalise", "absorb")
        for type_ in TYPES.values()
    ),
)

_BASIS_THREADS = 512
_THREADS = 256
_ROWS = 4


def orthonormalise(factors: Tensor, *, transposed: bool) -> Tensor:
    """An orthonormal basis of the columns of each of (k, n, r), of one block each.

    ``transposed``: ``factors`` are (k, r, n), and so is the result. r ≤ n, and r ≤ MAX_RANK.
    """
    basis = factors.new_empty(factors.shape)
    matrices, rows, rank = factors.shape
    strides = rank, 1
    if transposed:
        rows, rank = rank, rows
        strides = 1, rows
    launch(
        SOURCE,
        f"commhooks::kernels::orthonormalise<{TYPES[factors.dtype]}>",
        (factors, rows, rank, *strides, basis),
        grid=matrices,
        block=_BASIS_THREADS,
    )
    return basis


def absorb(
    verdict: Tensor,
    E: Tensor | None,
    G: Tensor,
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
) -> None:
    """E becomes E + G less the product of ``own``, and G the product of ``mean``, in one pass.

    If the verdict, () bool, is false: E stays as it is and G becomes NaN. G may be strided along k.
    """
    matrices, rows, columns = G.shape
    spacing = G.stride(0)
    memory = G.as_strided(((matrices - 1) * spacing + rows * columns,), (1,))
    vectors = -(-columns // (16 // G.itemsize))
    threads = -(-rows // _ROWS) * vectors
    shape = rows, columns, spacing, own[0].shape[2]
    launch(
        SOURCE,
        f"commhooks::kernels::absorb<{TYPES[G.dtype]}>",
        (verdict, E, memory, *shape, *own, *mean),
        grid=(-(-threads // _THREADS), matrices, 1),
        block=_THREADS,
    )
