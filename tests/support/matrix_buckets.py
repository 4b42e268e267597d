"""Buckets of matrices for tests of low-rank kernels, and checks of what the kernels compute."""

import torch
from torch import Tensor

from commhooks.algorithms.lowrank.bucket import Arithmetic, HalfStep, arithmetic_of
from commhooks.algorithms.lowrank.matrix_memory import MatrixMemory
from commhooks.algorithms.lowrank.matrix_plan import MatrixBatch, MatrixPlan, Piece, Side
from commhooks.algorithms.lowrank.payload import Payload

DTYPES = [torch.float32, torch.float64]


def close(found: Tensor, exact: Tensor, terms: int) -> None:
    tolerance = 8 * torch.finfo(found.dtype).eps * terms**0.5
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=4 * tolerance)


class Bucket:
    """Matrices of several shapes, some numbers apart, with errors and what works on them.

    Some of the numbers between them are sent as they are.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int, int, int]],
        dtype: torch.dtype,
        *,
        has_error: bool = True,
        device: str = "cpu",
    ) -> None:
        batches, exact, offset = [], [], 0
        for b, (k, n, m, r) in enumerate(shapes):
            keys = tuple(f"{b}.{i}" for i in range(k))
            pieces = [Piece(key, i * n * m, (i + 1) * n * m, (n, m)) for i, key in enumerate(keys)]
            batches.append(MatrixBatch(offset, n * m + 3, n, m, r, keys, tuple(pieces)))
            offset += k * (n * m + 3)
            exact.append((offset - 2, offset))
        if shapes:
            offset += 1500
            exact.append((offset - 1499, offset))
        self.plan = MatrixPlan(tuple(batches), tuple(exact))
        generator = torch.Generator().manual_seed(offset)
        self.buffer = torch.randn(offset, generator=generator).to(device, dtype)
        self.like = self.buffer.new_empty(0, dtype=torch.promote_types(dtype, torch.float32))
        options = {"sides": (Side.RIGHT,), "error_feedback": has_error, "seed": 0}
        self.memory = MatrixMemory(self.plan, {}, like=self.like, **options)
        if self.memory.error is not None:
            self.memory.error.normal_()

    @property
    def arithmetic(self) -> Arithmetic:
        return arithmetic_of(self.plan, self.memory, self.buffer, self.like)

    def factors(self, side: Side, *, has_exact: bool = False) -> Payload:
        found = Payload.empty(self.plan, side, has_exact=has_exact, like=self.like)
        found.flat.normal_()
        return found

    def half_step(self, side: Side, verdict: bool = True) -> HalfStep:
        own, mean = (self.factors(side, has_exact=True) for _ in range(2))
        told = torch.tensor(verdict, device=self.buffer.device)
        return HalfStep(self.factors(side.other), own, mean, told, is_sent=True)


def check_products(bucket: Bucket, side: Side, *, has_exact: bool) -> None:
    bucket.buffer[: bucket.buffer.numel() // 2] /= 2**14  # many of which are subnormal in float16
    basis = bucket.factors(side.other)
    arithmetic = bucket.arithmetic
    own = arithmetic.project(bucket.buffer, basis, has_exact=has_exact)
    total, _ = arithmetic.send(own, None)
    assert total.numel() == own.sent_elements
    assert torch.equal(total, own.flat[: total.numel()])
    matrices = zip(bucket.memory.errors, bucket.plan.views(bucket.buffer), strict=True)
    for (E, G), F, found in zip(matrices, basis.factors, own.factors, strict=True):
        M, B = G.double() + (0 if E is None else E.double()), F.double().mT
        close(found, M @ B if side is Side.LEFT else B @ M, 2 * max(M.shape))
    if has_exact:
        expected = torch.cat(bucket.plan.exact_parts(bucket.buffer)).to(total.dtype)
        assert torch.equal(own.exact, expected)


def check_absorb(bucket: Bucket, sides: list[Side], verdict: bool) -> None:
    halves = [bucket.half_step(side, verdict) for side in sides]
    expected = bucket.buffer.clone()  # but for the matrices
    for G in bucket.plan.views(expected):
        G.zero_()
    exact = halves[0].mean.exact
    halves[0].mean.store_exact(exact if verdict else exact * torch.nan, expected)
    sent, average = (
        [sum(P.double() @ Q.double() for P, Q in pairs) for pairs in zip(*of_halves, strict=True)]
        for of_halves in ([h.own_pairs for h in halves], [h.mean_pairs for h in halves])
    )
    if not verdict:
        bucket.buffer[0] = torch.inf
        halves[0].own.flat[0] = torch.nan
    errors = [
        None if E is None else E.double() + (G.double() - S if verdict else 0)
        for E, G, S in zip(
            bucket.memory.errors, bucket.plan.views(bucket.buffer), sent, strict=True
        )
    ]
    bucket.arithmetic.absorb(halves, halves[0].mean, bucket.buffer)
    views = bucket.plan.views(bucket.buffer)
    for batch, E, error, G, mean in zip(
        bucket.plan.batches, bucket.memory.errors, errors, views, average, strict=True
    ):
        terms = len(sides) * batch.rank + 2
        if E is not None:
            close(E, error, terms)
        if not verdict:
            assert G.isnan().all()
        elif G.dtype in DTYPES:
            close(G, mean, terms)
        else:
            torch.testing.assert_close(G.double(), mean, rtol=2**-7, atol=1e-2)
        G.zero_()
    torch.testing.assert_close(bucket.buffer, expected, rtol=0, atol=0, equal_nan=True)


def every_kernel() -> None:
    """Small, with memory that ends where tensors do."""
    bucket = Bucket([(1, 1, 1, 1), (2, 7, 33, 5), (1, 130, 68, 3)], torch.float32)
    arithmetic = bucket.arithmetic
    half = bucket.half_step(Side.RIGHT)
    for side in Side:
        basis = arithmetic.orthonormalize(bucket.factors(side))
        own = arithmetic.project(bucket.buffer, basis, has_exact=side is Side.LEFT)
        total, verdict = arithmetic.send(own, None)
        arithmetic.receive(total, 2, verdict)
    arithmetic.absorb([half], half.mean, bucket.buffer)
    arithmetic.keep(half.mean, bucket.memory.factors[Side.RIGHT], half.verdict)
