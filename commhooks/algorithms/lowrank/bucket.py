"""What low-rank compression does to all matrices of a bucket at once. Letters as in
algorithms/lowrank/products.py.

And to what is sent as it is: bases, products, what is sent and received, and the end of a step. On
a GPU each of these is one launch, however many shapes there are; elsewhere, and where CuPy is
missing, it goes shape by shape. So do products with many vectors, for which torch's are the faster
ones.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from commhooks.algorithms.lowrank.matrix_memory import MatrixMemory
from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, Side
from commhooks.algorithms.lowrank.payload import Payload
from commhooks.algorithms.lowrank.products import Factors, absorb, orthonormalize, project
from commhooks.codecs.finite import all_finite, nan_unless
from commhooks.errors import CommHookError
from commhooks.kernels import backend_of, require
from commhooks.kernels.lowrank import MAX_RANK, Matrix, MatrixKernels

__all__ = ["Arithmetic", "HalfStep", "arithmetic_of"]


@dataclass(frozen=True)
class HalfStep:
    """The orthonormal factors that were given, and the ones found: this rank's and their mean.

    ``verdict``: () bool, the same on all ranks: whether what has been received up to here is
    finite. See Note [All finite] in codecs/finite.py. ``is_sent``: whether their product is part of
    the
    result.
    """

    basis: Payload
    own: Payload
    mean: Payload
    verdict: Tensor
    is_sent: bool

    @cached_property
    def own_pairs(self) -> list[Factors]:
        """P and Q of what this rank sent, for every batch."""
        return list(self._pairs(self.own))

    @cached_property
    def mean_pairs(self) -> list[Factors]:
        """P and Q of what all ranks sent on average."""
        return list(self._pairs(self.mean))

    def flat_pair(self, found: Payload) -> Factors:
        """P and Q of all batches, at the beginning of these; ``found``: ``own`` or ``mean``."""
        pair = found.flat, self.basis.flat
        return pair if found.side is Side.LEFT else (pair[1], pair[0])

    def _pairs(self, found: Payload) -> Iterator[Factors]:
        for F, basis in zip(found.factors, self.basis.factors, strict=True):
            yield (F, basis) if found.side is Side.LEFT else (basis, F)


class Arithmetic(ABC):
    """Of one bucket. Does not wait for the device."""

    @abstractmethod
    def orthonormalize(self, factors: Payload) -> Payload:
        """Orthonormal bases of the columns of P, or of the rows of Q."""

    @abstractmethod
    def project(self, buffer: Tensor, basis: Payload, *, has_exact: bool) -> Payload:
        """The factors of M on the other side; with what is sent as it is, if ``has_exact``.

        To be completed by :meth:`send`. Until then factors on that side may be added to them.
        """

    @abstractmethod
    def send(self, own: Payload, earlier: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A copy to be summed over ranks, and the verdict so far; ``earlier``: before that.

        Becomes NaN, here and there: what is so large that products with it could overflow on one
        rank only.
        """

    @abstractmethod
    def receive(self, total: Tensor, ranks: int, verdict: Tensor | None) -> Tensor:
        """Makes the sum into the mean; the verdict, with what there is to say of this."""

    @abstractmethod
    def absorb(self, halves: Sequence[HalfStep], exact: Payload, buffer: Tensor) -> None:
        """Ends a step. See :func:`lowrank.absorb`.

        ``halves``: whose products are sent. ``exact``: with the mean of what was sent as it was.
        """

    @abstractmethod
    def keep(self, fresh: Payload, kept: Payload, verdict: Tensor) -> None:
        """Stores factors to start from, except for vectors that came out as zero.

        None if the verdict is false. A matrix of zeros, or of lower rank than r, has factors with
        vectors of zeros, from which no later step could find a direction again: there the old
        vectors stay.
        """


def arithmetic_of(
    plan: MatrixPlan, memory: MatrixMemory, buffer: Tensor, like: Tensor
) -> Arithmetic:
    """The fastest that there is. ``like``: of the device and dtype to work in."""
    ranks = [batch.rank for batch in plan.batches]
    if (
        backend_of(buffer) is None
        or max(ranks, default=0) > MAX_RANK
        or not _runs_kernels(buffer.device)
    ):
        return _ShapeByShape(plan, memory)
    kernels = MatrixKernels(list(_matrices(plan, memory)), buffer, like)
    return _OneLaunch(plan, memory, kernels)


def _matrices(plan: MatrixPlan, memory: MatrixMemory) -> Iterator[Matrix]:
    """Of all batches, and then what is sent as it is."""
    left = right = 0
    for batch, error in zip(plan.batches, memory.error_starts, strict=False):
        n, m, r = batch.rows, batch.columns, batch.rank
        for i in range(batch.count):
            gradient = batch.offset + i * batch.spacing
            yield Matrix(gradient, error + i * n * m, left, right, n, m, r)
            left += n * r
            right += r * m
    for start, stop in plan.exact:
        yield Matrix(start, 0, left, right, 1, stop - start, 0)
        left += stop - start
        right += stop - start


class _ShapeByShape(Arithmetic):
    """By the functions of algorithms/lowrank/products.py."""

    def __init__(self, plan: MatrixPlan, memory: MatrixMemory) -> None:
        self._plan = plan
        self._memory = memory

    def orthonormalize(self, factors: Payload) -> Payload:
        side = factors.side
        basis = Payload.empty(self._plan, side, has_exact=False, like=factors.flat)
        for F, out in zip(factors.factors, basis.factors, strict=True):
            out.copy_(orthonormalize(side, F))
        return basis

    def project(self, buffer: Tensor, basis: Payload, *, has_exact: bool) -> Payload:
        side = basis.side.other
        own = Payload.empty(self._plan, side, has_exact=has_exact, like=basis.flat)
        matrices = zip(self._memory.errors, self._plan.views(buffer), basis.factors, strict=True)
        for (E, G, F), out in zip(matrices, own.factors, strict=True):
            project(side, E, G, F, out=out)
        if has_exact:
            own.load_exact(buffer)
        return own

    def send(self, own: Payload, earlier: Tensor | None) -> tuple[Tensor, Tensor | None]:
        largest = torch.finfo(own.flat.dtype).max / 2**16
        own.flat.masked_fill_(own.flat.abs() > largest, torch.nan)
        return own.flat.clone(), earlier

    def receive(self, total: Tensor, ranks: int, verdict: Tensor | None) -> Tensor:
        finite = all_finite(total.div_(ranks))
        return finite if verdict is None else finite & verdict

    def absorb(self, halves: Sequence[HalfStep], exact: Payload, buffer: Tensor) -> None:
        verdict = halves[-1].verdict
        for i, (E, G) in enumerate(zip(self._memory.errors, self._plan.views(buffer), strict=True)):
            own = _sum([half.own_pairs[i] for half in halves])
            mean = _sum([half.mean_pairs[i] for half in halves])
            absorb(E, G, own, mean, verdict)
        if self._plan.exact:
            exact.store_exact(nan_unless(verdict, exact.exact), buffer)

    def keep(self, fresh: Payload, kept: Payload, verdict: Tensor) -> None:
        dim = -2 if fresh.side is Side.LEFT else -1
        for new, old in zip(fresh.factors, kept.factors, strict=True):
            is_alive = (new != 0).any(dim=dim, keepdim=True)
            old.copy_(torch.where(is_alive & verdict, new, old))


class _OneLaunch(_ShapeByShape):
    """By kernels. There is one verdict, which they change."""

    def __init__(self, plan: MatrixPlan, memory: MatrixMemory, kernels: MatrixKernels) -> None:
        super().__init__(plan, memory)
        self._kernels = kernels

    def orthonormalize(self, factors: Payload) -> Payload:
        side = factors.side
        basis = self._kernels.orthonormalize(side.value, factors.flat)
        return Payload(self._plan, side, basis, has_exact=False)

    def project(self, buffer: Tensor, basis: Payload, *, has_exact: bool) -> Payload:
        if not self._kernels.multiplies:
            return super().project(buffer, basis, has_exact=has_exact)
        side = basis.side.other
        spare = self._kernels.spare[side.value]
        own = Payload.empty(self._plan, side, has_exact=has_exact, like=basis.flat, spare=spare)
        self._kernels.project(
            side.value, self._memory.error, buffer, basis.flat, own.sent_elements, own.flat
        )
        return own

    def send(self, own: Payload, earlier: Tensor | None) -> tuple[Tensor, Tensor | None]:
        fresh = own.flat.new_empty((), dtype=torch.bool) if earlier is None else None
        total = self._kernels.send(own.side.value, own.flat, own.sent_elements, fresh)
        return total, fresh if earlier is None else earlier

    def receive(self, total: Tensor, ranks: int, verdict: Tensor | None) -> Tensor:
        assert verdict is not None
        self._kernels.receive(total, ranks, verdict)
        return verdict

    def absorb(self, halves: Sequence[HalfStep], exact: Payload, buffer: Tensor) -> None:
        self._kernels.absorb(
            halves[-1].verdict,
            self._memory.error,
            buffer,
            self._stack([half.flat_pair(half.own) for half in halves]),
            self._stack([half.flat_pair(half.mean) for half in halves]),
            len(halves),
            (exact.flat, exact.side.value),
        )

    def keep(self, fresh: Payload, kept: Payload, verdict: Tensor) -> None:
        self._kernels.keep(fresh.side.value, fresh.flat, kept.flat, verdict)

    def _stack(self, pairs: Sequence[Factors]) -> Factors:
        """Those of all half steps, one after the other."""
        if len(pairs) == 1:
            return pairs[0]
        lefts, rights = zip(*pairs, strict=True)
        left, right = (self._plan.factor_elements(side) for side in Side)
        return torch.cat([P[:left] for P in lefts]), torch.cat([Q[:right] for Q in rights])


def _sum(pairs: Sequence[Factors]) -> Factors:
    """The factors of the sum of products: all vectors side by side."""
    if len(pairs) == 1:
        return pairs[0]
    lefts, rights = zip(*pairs, strict=True)
    return torch.cat(lefts, dim=2), torch.cat(rights, dim=1)


@cache
def _runs_kernels(device: torch.device) -> bool:
    """Says so, once, if not."""
    try:
        require(device)
    except CommHookError as error:
        warnings.warn(f"low-rank compression goes through torch, slower: {error}", stacklevel=2)
        return False
    return True
