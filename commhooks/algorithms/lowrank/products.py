"""The products of low-rank compression, on k matrices of one shape at a time.

G: (k, n, m)  gradients, in the bucket's memory and dtype; may be strided along k
E: (k, n, m)  error memory, contiguous, or None where no error is kept
M: (k, n, m)  E + G, what is to be sent. It is never stored: it exists for one tile at a time
P: (k, n, r)  left factors          M ≈ P·Q: one factor is orthonormal, and the other one is
Q: (k, r, m)  right factors         M multiplied by it (this Q is the transpose of the paper's)

E, P and Q have one dtype, float32 or float64, whatever the dtype of G. No function keeps anything
or synchronizes a device; outputs may not overlap inputs.

Float32 on the CPU goes through compiled kernels, each of which is one pass over the memory; all
else goes through torch's products, tile by tile. On a GPU M is not made at all: torch takes the
products of E and of G and adds them up; with few vectors, kernels do all matrices of a bucket at
once, see algorithms/lowrank/bucket.py.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from commhooks import _C
from commhooks.algorithms.lowrank.matrix_plan import Side
from commhooks.codecs.finite import nan_unless
from commhooks.kernels import backend_of

__all__ = ["Factors", "absorb", "deflate", "orthonormalize", "project"]

Factors = tuple[Tensor, Tensor]
"""P and Q."""

# A tile of M, E and G fits in a core's second-level cache, so that the passes which make it and use
# it read the main memory once.
_TILE_ELEMENTS = 1 << 17


def project(side: Side, E: Tensor | None, G: Tensor, basis: Tensor, out: Tensor) -> None:
    """Writes the factors of M on ``side``, given those on the other side: M·Qᵀ or Pᵀ·M."""
    if _has_kernels(G):
        kernel = _C.project_left if side is Side.LEFT else _C.project_right
        kernel(E, G, basis, out)
        return
    if backend_of(G) is not None and G.dtype == out.dtype:
        _project_each(side, E, G, basis, out)
        return
    for matrices, rows in _tiles(G):
        M = G[matrices, rows].to(out.dtype) if E is None else E[matrices, rows] + G[matrices, rows]
        if side is Side.LEFT:
            torch.bmm(M, basis[matrices].mT, out=out[matrices, rows])
        else:
            beta = 0 if rows.start == 0 else 1
            out[matrices].baddbmm_(basis[matrices, rows].mT, M, beta=beta)


def _project_each(side: Side, E: Tensor | None, G: Tensor, basis: Tensor, out: Tensor) -> None:
    """The products with E and with G, in one pass over each."""
    transposed = basis.mT
    if side is Side.LEFT:
        torch.bmm(G, transposed, out=out)
        if E is not None:
            out.baddbmm_(E, transposed)
    else:
        torch.bmm(transposed, G, out=out)
        if E is not None:
            out.baddbmm_(transposed, E)


def deflate(side: Side, P: Tensor, Q: Tensor, basis: Tensor, out: Tensor) -> None:
    """Makes factors of M on ``side``, as :func:`project` wrote them, into those of M - P·Q."""
    if side is Side.LEFT:
        out.baddbmm_(P, torch.bmm(Q, basis.mT), alpha=-1)
    else:
        out.baddbmm_(torch.bmm(basis.mT, P), Q, alpha=-1)


def absorb(E: Tensor | None, G: Tensor, own: Factors, mean: Factors, verdict: Tensor) -> None:
    """Ends a step: E becomes M less what this rank sent, and G becomes what all sent on average.

    ``own`` and ``mean`` are P and Q of these, with any number of vectors. If the verdict, () bool,
    is false, which is not for the CPU, E stays as it is and G becomes NaN. What G's dtype has no
    range for is cut off, and goes to E, on every rank the same.
    """
    P, Q = own
    mean_P, mean_Q = mean
    if _has_kernels(G):
        _C.apply_factors(E, G, P, Q, mean_P, mean_Q)
        return
    if backend_of(G) is not None:
        P, Q = (torch.where(verdict, F, 0) for F in own)
        mean_Q = nan_unless(verdict, mean_Q)
        if E is not None:
            E.add_(torch.where(verdict, G, 0)).baddbmm_(P, Q, alpha=-1)
    for matrices, rows in _tiles(G):
        tile = G[matrices, rows]
        if E is not None and backend_of(G) is None:
            E[matrices, rows].add_(tile).baddbmm_(P[matrices, rows], Q[matrices], alpha=-1)
        if tile.dtype == mean_Q.dtype:
            torch.bmm(mean_P[matrices, rows], mean_Q[matrices], out=tile)
            continue
        product = torch.bmm(mean_P[matrices, rows], mean_Q[matrices])
        largest = torch.finfo(tile.dtype).max
        tile.copy_(product.clamp(-largest, largest))
        if E is not None:
            E[matrices, rows].add_(torch.where(product.abs() > largest, product - tile, 0))


def orthonormalize(side: Side, factor: Tensor) -> Tensor:
    """An orthonormal basis of every matrix's factor: columns of P, rows of Q.

    By Householder's QR, which needs no small constant to be safe: where a factor lacks rank, zero
    included, the basis is completed with other directions and is orthonormal all the same.
    """
    columns = factor if side is Side.LEFT else factor.mT
    basis: Tensor = torch.linalg.qr(columns).Q
    return (basis if side is Side.LEFT else basis.mT).contiguous()


def _has_kernels(G: Tensor) -> bool:
    return backend_of(G) is None and G.dtype == torch.float32


def _tiles(G: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cuts (k, n, m) into runs of whole matrices, or blocks of rows where one matrix is too large.

    Other devices than CPUs get everything at once: there the number of launches counts.
    """
    k, n, m = G.shape
    limit = _TILE_ELEMENTS if G.device.type == "cpu" else G.numel()
    if n * m <= limit:
        step = limit // (n * m)
        for i in range(0, k, step):
            yield slice(i, min(i + step, k)), slice(0, n)
        return
    step = max(1, limit // m)
    for i in range(k):
        for row in range(0, n, step):
            yield slice(i, i + 1), slice(row, min(row + step, n))
