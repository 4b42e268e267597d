"""Buckets of matrices for tests of low-rank kernels, and checks of what the kernels compute."""

import torch
from torch import Tensor

from commhooks.algorithms.lowrank.compressor import Compressor, HalfStep
from commhooks.algorithms.lowrank.kernel_compressor import make_compressor
from commhooks.algorithms.lowrank.matrix_plan import MatrixBatch, MatrixPlan, Side

DTYPES = [torch.float32, torch.float64]


def close(found: Tensor, exact: Tensor, terms: int) -> None:
    tolerance = 8 * torch.finfo(found.dtype).eps * terms**0.5
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=4 * tolerance)


class Bucket:
    """Matrices of several shapes with some numbers between them, and their errors.

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
        batches, exact, errors, offset = [], [], [], 0
        for b, (k, n, m, r) in enumerate(shapes):
            keys = tuple(f"{b}.{i}" for i in range(k))
            batches.append(MatrixBatch(offset, n * m + 3, n, m, r, keys))
            errors += [(key, (n, m)) for key in keys]
            offset += k * (n * m + 3)
            exact.append((offset - 2, offset))
        if shapes:
            offset += 1500
            exact.append((offset - 1499, offset))
        self.plan = MatrixPlan(tuple(batches), tuple(exact), tuple(errors))
        generator = torch.Generator().manual_seed(offset)
        self.buffer = torch.randn(offset, generator=generator).to(device, dtype)
        self.dtype = torch.promote_types(dtype, torch.float32)
        self._has_error = has_error
        self._state = {key: {"error": torch.randn(shape)} for key, shape in errors}

    def compressor(self) -> Compressor:
        """Another one with the same errors; it runs kernels if it is made where they run."""
        return make_compressor(
            self.plan,
            self.buffer,
            self._state,
            kept_sides=Side,
            error_feedback=self._has_error,
            seed=0,
        )

    def factors(self, side: Side, *, has_exact: bool = False) -> Tensor:
        elements = self.plan.sent_elements(side, has_exact=has_exact)
        return torch.randn(elements, dtype=self.dtype, device=self.buffer.device)

    def half_step(self, side: Side, finite: bool = True) -> HalfStep:
        basis = self.factors(side.other)
        own, mean = (self.factors(side, has_exact=True) for _ in range(2))
        return HalfStep(side, basis, own, mean, torch.tensor(finite, device=self.buffer.device))

    def products(self, side_factors: tuple[Tensor, Tensor]) -> list[Tensor]:
        """P·Q of each batch, in float64."""
        factors = (self.plan.factors(side, side_factors[side]) for side in Side)
        return [P.double() @ Q.double() for P, Q in zip(*factors, strict=True)]


def errors_of(compressor: Compressor) -> list[Tensor | None]:
    if compressor.error is None:
        return [None] * len(compressor.plan.batches)
    return list(compressor.plan.errors(compressor.error))


def own_factors(half: HalfStep) -> tuple[Tensor, Tensor]:
    return half.factors[0], half.factors[1]


def mean_factors(half: HalfStep) -> tuple[Tensor, Tensor]:
    return half.factors[2], half.factors[3]


def check_products(bucket: Bucket, side: Side, *, has_exact: bool) -> None:
    bucket.buffer[: bucket.buffer.numel() // 2] /= 2**14  # many are then subnormal in float16
    plan, compressor = bucket.plan, bucket.compressor()
    basis = bucket.factors(side.other)
    own = compressor.project(side, bucket.buffer, basis, has_exact=has_exact)
    earlier = None if has_exact else torch.tensor(True, device=own.device)
    total, _ = compressor.message(side, own, earlier)
    assert total.numel() == plan.sent_elements(side, has_exact=has_exact)
    assert torch.equal(total, own[: total.numel()])
    for E, G, F, found in zip(
        errors_of(compressor),
        plan.gradients(bucket.buffer),
        plan.factors(side.other, basis),
        plan.factors(side, own),
        strict=True,
    ):
        M, B = G.double() + (0 if E is None else E.double()), F.double().mT
        close(found, M @ B if side is Side.LEFT else B @ M, 2 * max(M.shape))
    if has_exact:
        expected = torch.cat(plan.exact_parts(bucket.buffer)).to(total.dtype)
        assert torch.equal(torch.cat(plan.exact_parts_behind(side, own)), expected)


def check_apply(bucket: Bucket, sides: list[Side], finite: bool) -> None:
    plan, compressor = bucket.plan, bucket.compressor()
    halves = [bucket.half_step(side, finite) for side in sides]
    first = halves[0]
    expected = bucket.buffer.clone()  # except for the matrices
    for G in plan.gradients(expected):
        G.zero_()
    exact = plan.exact_parts_behind(first.side, first.mean)
    for part, mean in zip(plan.exact_parts(expected), exact, strict=True):
        part.copy_(mean if finite else mean * torch.nan)
    sent, average = (
        [sum(products) for products in zip(*map(bucket.products, pairs), strict=True)]
        for pairs in (map(own_factors, halves), map(mean_factors, halves))
    )
    if not finite:
        bucket.buffer[0] = torch.inf
        first.own[0] = torch.nan
    errors = [
        None if E is None else E.double() + (G.double() - S if finite else 0)
        for E, G, S in zip(errors_of(compressor), plan.gradients(bucket.buffer), sent, strict=True)
    ]
    compressor.apply(halves, first, bucket.buffer, halves[-1].all_finite)
    views = plan.gradients(bucket.buffer)
    for batch, E, error, G, mean in zip(
        plan.batches, errors_of(compressor), errors, views, average, strict=True
    ):
        terms = len(sides) * batch.rank + 2
        if E is not None:
            close(E, error, terms)
        if not finite:
            assert G.isnan().all()
        elif G.dtype in DTYPES:
            close(G, mean, terms)
        else:
            torch.testing.assert_close(G.double(), mean, rtol=2**-7, atol=1e-2)
        G.zero_()
    torch.testing.assert_close(bucket.buffer, expected, rtol=0, atol=0, equal_nan=True)


def every_kernel() -> None:
    """Small, with memory that ends where tensors do."""
    bucket = Bucket([(1, 1, 1, 1), (2, 7, 33, 5), (1, 130, 68, 3), (1, 4100, 5, 2)], torch.float32)
    compressor = bucket.compressor()
    half = bucket.half_step(Side.RIGHT)
    finite = None
    for side in Side:
        basis = compressor.orthonormalize(side.other, bucket.factors(side.other))
        own = compressor.project(side, bucket.buffer, basis, has_exact=finite is None)
        total, finite = compressor.message(side, own, finite)
        finite = compressor.average(total, 2, finite)
    compressor.apply([half], half, bucket.buffer, half.all_finite)
    compressor.store_factors(half, half.all_finite)
