"""The matrices of a bucket: what PowerSGD keeps of them and computes for all of them at once.

A batch is k matrices of one shape.

G: (k, n, m)  gradients, in the bucket's memory and dtype; may be strided along k
E: (k, n, m)  errors, contiguous, or None without error feedback
M: (k, n, m)  E + G, the matrices to send; never stored as a whole
P: (k, n, r)  left factors          M ≈ P·Q: one factor is orthonormal, and the other one is
Q: (k, r, m)  right factors         M multiplied by it (this Q is the transpose of the paper's)

E, P and Q have one dtype, float32 or float64, whatever the dtype of G. The factors of one side of
all batches are one flat tensor, and so is what is sent:

    | factors of batch 0 | factors of batch 1 | ... | exact range 0 | exact range 1 | ...
      (k, n, r) or (k, r, m)                          only in the first half step

:class:`Compressor` goes batch by batch: float32 on the CPU through compiled functions with one pass
over the memory each, everything else through torch's products. On a GPU with CuPy each method is
one launch for all batches: kernel_compressor.py. Nothing here synchronizes a device.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks import native
from commhooks.algorithms.bucket_memory import adopt, widened
from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, Side
from commhooks.codecs.finite import all_finite, select
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import TensorState
from commhooks.kernels import kernel_backend_of
from commhooks.precision import at_least_float32
from reducer import GradBucket

# A tile of M, E and G fits in a core's second-level cache, so that the passes that make it and use
# it read the main memory once.
_TILE_ELEMENTS = 1 << 17

_HAS_LOOPS = hasattr(native, "project_left")


class HalfStep(NamedTuple):
    """The factors of one side of all matrices, and the orthonormal ones that they came from."""

    side: Side  # of ``own`` and ``mean``
    basis: Tensor  # of the other side
    own: Tensor  # this rank's
    mean: Tensor  # over all ranks
    all_finite: Tensor  # () bool: whether everything received so far is; the same on all ranks

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """P and Q of what this rank sent, then those of the mean."""
        if self.side is Side.LEFT:
            return self.own, self.basis, self.mean, self.basis
        return self.basis, self.own, self.basis, self.mean


def factors_of(halves: Sequence[HalfStep]) -> list[tuple[Side, Sequence[Tensor]]]:
    """Return the side of each of the :attr:`~HalfStep.factors`, and those of all half steps."""
    of_halves = zip(*(half.factors for half in halves), strict=True)
    return list(zip((*Side, *Side), of_halves, strict=True))


class Compressor:
    """The errors and factors of a bucket's matrices, and the products with them.

    ``error`` is flat, zeros at first, None without error feedback; in ``error_dtype`` between
    steps, see :meth:`step`. ``factors`` holds those to start from, of each of ``kept_sides``,
    random at first. The entries of ``state`` are copied, and become views of these.
    """

    def __init__(
        self,
        plan: MatrixPlan,
        buffer: Tensor,
        state: TensorState,
        *,
        kept_sides: Iterable[Side],
        error_feedback: bool,
        seed: int,
        error_dtype: torch.dtype | None = None,
    ) -> None:
        self.plan = plan
        self._like = buffer.new_empty(0, dtype=at_least_float32(buffer.dtype))
        self.error: Tensor | None = None
        self._errors: Sequence[Tensor | None] = [None] * len(plan.batches)
        if error_feedback:
            elements = sum(math.prod(shape) for _, shape in plan.error_shapes)
            self.error = self._like.new_zeros(elements, dtype=error_dtype)
            adopt(state, "error", plan.error_entries(self.error))
            self._errors = plan.errors(self.error)
        self.factors: dict[Side, Tensor] = {}
        for side in kept_sides:
            self.factors[side] = self.draw_factors(side, seed)
            adopt(state, side.name.lower(), plan.factor_entries(side, self.factors[side]))

    @contextmanager
    def step(self, bucket: GradBucket, comm: Communicator) -> Iterator[None]:
        """Have the errors in the dtype of factors, as all other methods need them."""
        kept, errors = self.error, self._errors
        if kept is None or kept.dtype == self._like.dtype:
            yield
            return
        try:
            with widened(kept, bucket, comm) as self.error:
                self._errors = self.plan.errors(self.error)
                yield
        finally:
            self.error, self._errors = kept, errors

    def draw_factors(self, side: Side, seed: int, step: int = 0) -> Tensor:
        """Return random factors, which depend on the arguments and the keys of matrices only.

        They are thus the same on all ranks and devices, however parameters are put into buckets.
        """
        flat = torch.empty(self.plan.factor_elements[side])
        for key, factor in self.plan.factor_entries(side, flat):
            draw_factor(factor, side, key, seed, step)
        if self._like.is_cuda:
            flat = flat.pin_memory()  # or the host would wait for the copy
        return flat.to(self._like, non_blocking=True)

    def orthonormalize(self, side: Side, factors: Tensor) -> Tensor:
        """Return orthonormal bases of the columns of each P, or of the rows of each Q."""
        bases = factors.new_empty(self.plan.factor_elements[side])
        for factor, basis in zip(*self._views(side, factors, bases), strict=True):
            basis.copy_(orthonormal_basis(side, factor))
        return bases

    def project(self, side: Side, buffer: Tensor, basis: Tensor, *, has_exact: bool) -> Tensor:
        """Return the factors of M on one side, given those on the other side: M·Qᵀ or Pᵀ·M.

        :meth:`message` completes them. ``has_exact``: the exact ranges follow.
        """
        sent = self.plan.sent_elements(side, has_exact=has_exact)
        own = basis.new_empty(sent)
        matrices = zip(
            self._errors,
            self.plan.gradients(buffer),
            self.plan.factors(side.other, basis),
            self.plan.factors(side, own),
            strict=True,
        )
        for E, G, of_batch, out in matrices:
            project_batch(side, E, G, of_batch, out)
        if has_exact and self.plan.exact:
            torch._foreach_copy_(
                self.plan.exact_parts_behind(side, own), self.plan.exact_parts(buffer)
            )
        return own

    def deflate(self, side: Side, own: Tensor, basis: Tensor, sent: HalfStep) -> None:
        """Subtract from ``own`` what :meth:`project` makes of the product that was sent."""
        own_P, own_Q, *_ = sent.factors
        factors = zip(
            self.plan.factors(Side.LEFT, own_P),
            self.plan.factors(Side.RIGHT, own_Q),
            self.plan.factors(side.other, basis),
            self.plan.factors(side, own),
            strict=True,
        )
        for P, Q, of_batch, out in factors:
            deflate_batch(side, P, Q, of_batch, out)

    def message(
        self,
        side: Side,  # noqa: ARG002
        own: Tensor,
        earlier: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return a copy of ``own`` to be summed over ranks, and the flag for :meth:`average`.

        ``earlier``: that of the half step before, None for the first one, which has the exact
        ranges. In ``own`` and the copy, numbers so large that products with them could overflow on
        one rank only become NaN.
        """
        largest = torch.finfo(own.dtype).max / 2**16
        own.masked_fill_(own.abs() > largest, torch.nan)
        return own.clone(), earlier

    def average(self, total: Tensor, ranks: int, earlier: Tensor | None) -> Tensor:
        """Turn a sum into the mean, in place; return whether it and all before it are finite."""
        is_finite = all_finite(total.div_(ranks))
        return is_finite if earlier is None else is_finite & earlier

    def apply(
        self, sent: Sequence[HalfStep], first: HalfStep, buffer: Tensor, all_finite: Tensor
    ) -> None:
        """End a step: set E to M less what this rank sent, and G to what all sent on average.

        What was sent is the sum of the products of ``sent``. The exact ranges become the means that
        follow the factors of ``first``. If ``all_finite`` is false, which on the CPU it never is, E
        stays as it is and G becomes NaN.
        """
        matrices = zip(
            self._errors,
            self.plan.gradients(buffer),
            *(self._side_by_side(side, factors) for side, factors in factors_of(sent)),
            strict=True,
        )
        for E, G, P, Q, mean_P, mean_Q in matrices:
            apply_to_batch(E, G, (P, Q), (mean_P, mean_Q), all_finite)
        if self.plan.exact:
            exact_mean = select(all_finite, first.mean, torch.nan)
            torch._foreach_copy_(
                self.plan.exact_parts(buffer), self.plan.exact_parts_behind(first.side, exact_mean)
            )

    def store_factors(self, half: HalfStep, all_finite: Tensor) -> None:
        """Store the mean factors to start from them again, except for vectors of zeros.

        A matrix of zeros, or of a lower rank than r, has factors with vectors of zeros, from which
        no later step could find a direction again: there the old vectors stay. If ``all_finite`` is
        false all stay.
        """
        side, kept = half.side, self.factors[half.side]
        dim = -2 if side is Side.LEFT else -1
        for new, old in zip(*self._views(side, half.mean, kept), strict=True):
            is_alive = (new != 0).any(dim=dim, keepdim=True)
            old.copy_(torch.where(is_alive & all_finite, new, old))

    def _views(self, side: Side, *factors: Tensor) -> list[list[Tensor]]:
        return [self.plan.factors(side, flat) for flat in factors]

    def _side_by_side(self, side: Side, factors: Sequence[Tensor]) -> list[Tensor]:
        """Join the vectors of half steps: the product of all is the sum of their products."""
        if len(factors) == 1:
            return self.plan.factors(side, factors[0])
        dim = 2 if side is Side.LEFT else 1
        of_batches = zip(*self._views(side, *factors), strict=True)
        return [torch.cat(of_batch, dim=dim) for of_batch in of_batches]


def draw_factor(factor: Tensor, side: Side, key: str, seed: int, step: int = 0) -> None:
    """Fill a factor on the CPU with the random numbers of :meth:`Compressor.draw_factors`."""
    digest = hashlib.sha256(f"{seed}/{step}/{side.name}/{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    factor.normal_(generator=generator)


def project_batch(side: Side, E: Tensor | None, G: Tensor, basis: Tensor, out: Tensor) -> None:
    """Write the factors of M on one side, given those on the other side: M·Qᵀ or Pᵀ·M."""
    if _is_compiled(G):
        kernel = native.project_left if side is Side.LEFT else native.project_right
        kernel(E, G, basis, out)
        return
    if kernel_backend_of(G) is not None and G.dtype == out.dtype:  # M would take memory of the GPU
        for beta, term in enumerate((G,) if E is None else (G, E)):
            operands = (term, basis.mT) if side is Side.LEFT else (basis.mT, term)
            out.baddbmm_(*operands, beta=beta)
        return
    for matrices, rows in _tiles(G):
        M = G[matrices, rows].to(out.dtype) if E is None else E[matrices, rows] + G[matrices, rows]
        if side is Side.LEFT:
            torch.bmm(M, basis[matrices].mT, out=out[matrices, rows])
        else:
            beta = 0 if rows.start == 0 else 1
            out[matrices].baddbmm_(basis[matrices, rows].mT, M, beta=beta)


def deflate_batch(side: Side, P: Tensor, Q: Tensor, basis: Tensor, out: Tensor) -> None:
    """Turn factors of M, as :func:`project_batch` wrote them, into factors of M - P·Q."""
    if side is Side.LEFT:
        out.baddbmm_(P, torch.bmm(Q, basis.mT), alpha=-1)
    else:
        out.baddbmm_(torch.bmm(basis.mT, P), Q, alpha=-1)


def apply_to_batch(
    E: Tensor | None,
    G: Tensor,
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
    all_finite: Tensor,
) -> None:
    """Set E to M - P·Q of ``own``, and G to P·Q of ``mean``; see :meth:`Compressor.apply`.

    Results beyond the range of G's dtype are clamped; the rest goes to E, the same on every rank.
    """
    if _is_compiled(G):
        native.apply_factors(E, G, *own, *mean)
        return
    P, Q = (select(all_finite, factor, 0.0) for factor in own)
    mean_P, mean_Q = mean[0], select(all_finite, mean[1], torch.nan)
    for matrices, rows in _tiles(G):
        G_tile, E_tile = G[matrices, rows], None if E is None else E[matrices, rows]
        if E_tile is not None:
            E_tile.add_(select(all_finite, G_tile, 0.0))
            E_tile.baddbmm_(P[matrices, rows], Q[matrices], alpha=-1)
        if G_tile.dtype == mean_Q.dtype:
            torch.bmm(mean_P[matrices, rows], mean_Q[matrices], out=G_tile)
            continue
        product = torch.bmm(mean_P[matrices, rows], mean_Q[matrices])
        largest = torch.finfo(G_tile.dtype).max
        G_tile.copy_(product.clamp(-largest, largest))
        if E_tile is not None:
            E_tile.add_(torch.where(product.abs() > largest, product - G_tile, 0))


def orthonormal_basis(side: Side, factor: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of each P, or of the rows of each Q.

    It is Householder's QR, which needs no small constant to be safe: where a factor lacks rank,
    zero included, the basis is completed with other directions and is orthonormal all the same.
    """
    if side is Side.RIGHT:
        return orthonormal_basis(Side.LEFT, factor.mT).mT
    basis: Tensor = torch.linalg.qr(factor).Q
    return basis


def _is_compiled(G: Tensor) -> bool:
    return _HAS_LOOPS and kernel_backend_of(G) is None and G.dtype == torch.float32


def _tiles(G: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of whole matrices, or of rows where one matrix is too large for a tile.

    On devices other than CPUs everything is one tile: there the number of launches counts.
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
