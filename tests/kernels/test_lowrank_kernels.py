"""Low-rank compression on a GPU: against float64 and against the CPU, on awkward sizes."""

from contextlib import nullcontext

import pytest
import torch
from emulation import EmulationError, emulated
from support.matrix_buckets import (
    DTYPES,
    Bucket,
    check_apply,
    check_products,
    close,
    errors_of,
    mean_factors,
)
from torch import Tensor

from commhooks.algorithms.lowrank.compressor import HalfStep, project_batch
from commhooks.algorithms.lowrank.kernel_compressor import make_compressor
from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, Side
from commhooks.kernels import launch
from commhooks.kernels.source import LOWRANK, kernel_name
from commhooks.testing.compare import same_bits

# k, n, m, r: below, at and above vectors, rows that are handled together, and blocks.
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 5, 2),
    (3, 4, 16, 4),
    (1, 7, 33, 5),
    (2, 130, 68, 3),
    (1, 700, 1030, 9),
]
# By the highest rank; with sums over one span and over several.
RANKS = {
    8: [(1, 1, 1, 1), (2, 5, 7, 2), (3, 4, 16, 4), (1, 70, 33, 7), (1, 6, 1030, 8)],
    16: [(2, 5, 7, 2), (1, 130, 18, 9), (1, 33, 50, 16)],
    17: [(2, 40, 35, 17), (1, 5, 9, 3)],
}
HALVES = [torch.float16, torch.bfloat16]


def matrices(k: int, n: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Errors, and gradients that lie apart as they do in a bucket."""
    generator = torch.Generator().manual_seed(k * n * m)
    apart = torch.randn(k, n * m + 3, generator=generator).to(dtype)
    error = torch.randn(k, n, m, generator=generator).to(dtype)
    return error, apart[:, : n * m].unflatten(1, (n, m))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("side", Side)
def test_project(shape, has_error, side, dtype):
    k, n, m, r = shape
    E, G = matrices(k, n, m, dtype)
    E = E.to(torch.promote_types(dtype, torch.float32)) if has_error else None
    wide = torch.promote_types(dtype, torch.float32)
    M = G.double() + (0 if E is None else E.double())
    basis = torch.randn((k, r, m) if side is Side.LEFT else (k, n, r), dtype=wide)
    out = torch.full((k, n, r) if side is Side.LEFT else (k, r, m), torch.nan, dtype=wide)
    with emulated():
        project_batch(side, E, G, basis, out)
    B = basis.double().mT
    close(out, M @ B if side is Side.LEFT else B @ M, 2 * max(n, m))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [*DTYPES, *HALVES])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("has_error", "has_exact"), [(False, True), (True, False)])
@pytest.mark.parametrize("side", Side)
def test_all_products_of_a_bucket(side, has_error, has_exact, rank, dtype):
    with emulated():
        check_products(Bucket(RANKS[rank], dtype, has_error=has_error), side, has_exact=has_exact)


@pytest.mark.parametrize(
    ("side", "shape"), [(Side.LEFT, (1, 1, 131200, 1)), (Side.RIGHT, (1, 8300, 3, 1))]
)
def test_products_over_the_most_spans(side, shape):
    with emulated():
        check_products(Bucket([shape], torch.float32), side, has_exact=True)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [*DTYPES, *HALVES])
@pytest.mark.parametrize("sides", [[Side.LEFT], [Side.RIGHT], [Side.RIGHT, Side.LEFT]])
@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("finite", [False, True])
def test_apply(sides, has_error, finite, dtype):
    with emulated():
        check_apply(Bucket(SHAPES, dtype, has_error=has_error), sides, finite)


@pytest.mark.parametrize("has_error", [False, True])
def test_results_beyond_the_range_of_half_precision_go_to_errors(has_error):
    """On the CPU, and by kernels on a GPU."""
    found = []
    for context in (nullcontext(), emulated()):
        torch.manual_seed(0)
        bucket = Bucket(SHAPES, torch.float16, has_error=has_error)
        half = bucket.half_step(Side.RIGHT)
        half.mean[: bucket.plan.factor_elements[Side.RIGHT]] *= 1e5
        with context:
            compressor = bucket.compressor()
            compressor.apply([half], half, bucket.buffer, half.all_finite)
        found.append((bucket.buffer, compressor.error))
        products = bucket.products(mean_factors(half))
        matrices = zip(bucket.plan.gradients(bucket.buffer), errors_of(compressor), strict=True)
        for (G, E), product in zip(matrices, products, strict=True):
            assert G.isfinite().all()
            if E is not None:
                beyond = product.abs() > 1.1 * torch.finfo(torch.float16).max
                assert beyond.any() or G.numel() < 9
                assert (E.abs()[beyond] > 1e3).all()
    (buffer, error), (of_kernels, error_of_kernels) = found
    torch.testing.assert_close(of_kernels, buffer)
    torch.testing.assert_close(error_of_kernels, error, rtol=1e-4, atol=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("finite", [False, True])
def test_apply_beyond_the_ranks_of_kernels(finite, dtype):
    with emulated():
        check_apply(Bucket([(2, 258, 260, 257)], dtype), [Side.RIGHT], finite)


def test_the_members_of_a_struct_are_counted():
    kernel = kernel_name("apply", "float", "float")
    with emulated(), pytest.raises(EmulationError, match="expected 14 arguments, found 1"):
        launch(LOWRANK, kernel, (torch.zeros(4),), grid=1)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_widened_and_narrowed_as_torch_does(dtype):
    """All halves, the numbers between two neighbors, and numbers beyond the largest half."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    halves = bits.view(dtype)
    finite = halves[halves.isfinite()].float().sort().values
    between = (finite[:-1] + finite[1:]) / 2
    largest = torch.finfo(dtype).max * torch.tensor([1 + 2**-13, 1 + 2**-10, 1.002, 1.01])
    numbers = torch.cat([
        halves.float(), between, *(between.nextafter(torch.tensor(s)) for s in (-1e38, 1e38)),
        largest, -largest, torch.tensor([2**-149, -(2**-149), 3e38, torch.inf, torch.nan]),
    ])  # fmt: skip
    plan = MatrixPlan((), ((0, numbers.numel()),), ())
    buffer = numbers.to(dtype)
    nothing = numbers[:0]
    with emulated():
        compressor = make_compressor(plan, buffer, {}, kept_sides=(), error_feedback=False, seed=0)
        widened = compressor.project(Side.LEFT, buffer, nothing, has_exact=True)
        assert same_bits(widened.nan_to_num(9.0), buffer.float().nan_to_num(9.0))
        narrowed = torch.empty_like(buffer)
        half = HalfStep(Side.LEFT, nothing, numbers, numbers, torch.tensor(True))
        compressor.apply([half], half, narrowed, half.all_finite)
    assert torch.equal(narrowed.isnan(), buffer.isnan())
    assert same_bits(narrowed[~buffer.isnan()], buffer[~buffer.isnan()])


# Rows, no more columns than rows.
TALL = [(1, 1, 1, 1), (3, 4, 4, 4), (2, 5, 5, 1), (2, 700, 6, 4), (1, 600, 9, 9)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", Side)
def test_bases_are_those_of_lapack(side, dtype, is_backward):
    torch.manual_seed(0)  # of some square matrices, both are far off
    shapes = [(k, n, m, r) if side is Side.LEFT else (k, m, n, r) for k, n, m, r in TALL]
    bucket = Bucket(shapes, dtype)
    factors = bucket.factors(side)
    before = factors.clone()
    expected = bucket.compressor().orthonormalize(side, factors)
    with emulated(is_backward):
        found = bucket.compressor().orthonormalize(side, factors)
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(factors, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bases_of_dependent_columns_are_orthonormal(dtype):
    bucket = Bucket([(6, 30, 9, 3)], dtype)
    factors = bucket.factors(Side.LEFT)
    (columns,) = bucket.plan.factors(Side.LEFT, factors)
    columns[1] = 0
    columns[2, :, 1] = 0
    columns[3] *= 1e-30
    columns[3, :, 2] = columns[3, :, 0]
    columns[4, 1:] = 0
    columns[5] *= 1e33 if dtype == torch.float32 else 1e150
    with emulated():
        bases = bucket.compressor().orthonormalize(Side.LEFT, factors)
    (basis,) = bucket.plan.factors(Side.LEFT, bases)
    tolerance = 100 * torch.finfo(dtype).eps
    identity = torch.eye(3, dtype=dtype).expand(6, 3, 3)
    torch.testing.assert_close(basis.mT @ basis, identity, rtol=tolerance, atol=tolerance)


def test_bases_of_factors_that_are_not_finite_are_not_finite():
    bucket = Bucket([(2, 30, 9, 3)], torch.float32)
    factors = bucket.factors(Side.LEFT)
    (columns,) = bucket.plan.factors(Side.LEFT, factors)
    columns[1, 17, 1] = torch.nan
    with emulated():
        bases = bucket.compressor().orthonormalize(Side.LEFT, factors)
    (basis,) = bucket.plan.factors(Side.LEFT, bases)
    assert basis[0].isfinite().all()
    assert basis[1].isnan().any()


# Factors of more than 4,096 rows are divided into panels; some small ones lie between them.
DIVIDED = [(1, 4097, 3, 1), (2, 7, 5, 3), (1, 4500, 9, 5), (1, 4096, 6, 2), (1, 4100, 20, 18)]


def divided(side: Side, dtype: torch.dtype) -> Bucket:
    return Bucket(
        [(k, n, m, r) if side is Side.LEFT else (k, m, n, r) for k, n, m, r in DIVIDED], dtype
    )


def tall(side: Side, factors: Tensor) -> Tensor:
    return factors if side is Side.LEFT else factors.mT


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", Side)
def test_bases_of_tall_factors_are_those_of_lapack_but_for_signs(side, dtype):
    bucket = divided(side, dtype)
    factors = bucket.factors(side)
    before = factors.clone()
    expected = bucket.compressor().orthonormalize(side, factors)
    found = []
    for is_backward in (False, True):
        with emulated(is_backward):
            found.append(bucket.compressor().orthonormalize(side, factors))
    assert same_bits(*found)
    assert torch.equal(factors, before)
    tolerance = 100 * torch.finfo(dtype).eps
    views = (bucket.plan.factors(side, flat) for flat in (found[0], expected))
    for basis, of_lapack in zip(*views, strict=True):
        signs = (basis * of_lapack).sum(dim=-2 if side is Side.LEFT else -1, keepdim=True).sign()
        torch.testing.assert_close(basis * signs, of_lapack, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("side", Side)
def test_bases_of_tall_factors_do_not_depend_on_other_matrices(side):
    bucket = divided(side, torch.float32)
    factors = bucket.factors(side)
    with emulated():
        together = bucket.plan.factors(side, bucket.compressor().orthonormalize(side, factors))
        for batch, own, found in zip(
            bucket.plan.batches, bucket.plan.factors(side, factors), together, strict=True
        ):
            alone = Bucket(
                [(len(batch.keys), batch.rows, batch.columns, batch.rank)], torch.float32
            )
            basis = alone.compressor().orthonormalize(side, own.flatten())
            assert same_bits(basis, found.flatten())


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", Side)
def test_bases_of_dependent_columns_of_tall_factors_are_orthonormal(side, dtype):
    shape = (7, 5000, 9, 4) if side is Side.LEFT else (7, 9, 5000, 4)
    bucket = Bucket([shape], dtype)
    factors = bucket.factors(side)
    (views,) = bucket.plan.factors(side, factors)
    columns = tall(side, views)
    columns[1] = 0
    columns[2, :, 1] = 0
    columns[3] *= 1e-30
    columns[3, :, 2] = columns[3, :, 0]
    columns[4, 1:] = 0
    columns[5] *= 1e33 if dtype == torch.float32 else 1e150
    columns[6, :4999] = 0  # all panels but the last
    with emulated():
        bases = bucket.compressor().orthonormalize(side, factors)
    basis = tall(side, bucket.plan.factors(side, bases)[0])
    tolerance = 100 * torch.finfo(dtype).eps
    identity = torch.eye(4, dtype=dtype).expand(7, 4, 4)
    torch.testing.assert_close(basis.mT @ basis, identity, rtol=tolerance, atol=tolerance)
    for i in (0, 2, 3):  # what they span is kept
        scaled = columns[i] / columns[i].abs().max()
        torch.testing.assert_close(
            basis[i] @ (basis[i].mT @ scaled), scaled, rtol=tolerance, atol=tolerance
        )


def test_bases_of_tall_factors_that_are_not_finite_are_not_finite():
    bucket = Bucket([(2, 5000, 9, 3)], torch.float32)
    factors = bucket.factors(Side.LEFT)
    (columns,) = bucket.plan.factors(Side.LEFT, factors)
    columns[1, 4999, 1] = torch.nan
    with emulated():
        bases = bucket.compressor().orthonormalize(Side.LEFT, factors)
    (basis,) = bucket.plan.factors(Side.LEFT, bases)
    assert basis[0].isfinite().all()
    assert basis[1].isnan().any()


@pytest.mark.exhaustive
def test_bases_of_tall_factors_of_a_high_rank_are_orthonormal():
    bucket = Bucket([(1, 4097, 130, 130)], torch.float32)
    factors = bucket.factors(Side.LEFT)
    with emulated():
        bases = bucket.compressor().orthonormalize(Side.LEFT, factors)
    (basis,) = bucket.plan.factors(Side.LEFT, bases)[0]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(130), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3, 4096, 4099])
def test_messages_and_their_average(numel, dtype, is_emulated):
    own = torch.randn(numel, dtype=dtype)
    plan = MatrixPlan((), ((0, numel),), ())
    largest = torch.finfo(dtype).max / 2**16
    with emulated() if is_emulated else nullcontext():
        compressor = make_compressor(plan, own, {}, kept_sides=(), error_feedback=False, seed=0)
        total, finite = compressor.message(Side.LEFT, own, None)
        assert torch.equal(total, own)
        assert total.data_ptr() != own.data_ptr() or numel == 0
        finite = compressor.average(total.mul_(3), 3, finite)
        torch.testing.assert_close(total, own)
        assert finite
        for number in (torch.inf, -torch.inf, torch.nan, -2 * largest) if numel else ():
            own[-1] = number
            total, finite = compressor.message(Side.LEFT, own, None)
            expected = [False] * (numel - 1) + [True]
            assert total.isnan().tolist() == own.isnan().tolist() == expected
            finite = compressor.average(total, 3, finite)
            assert not finite
            assert not compressor.average(torch.ones(3, dtype=dtype), 3, finite)
        own.fill_(-largest)
        total, finite = compressor.message(Side.LEFT, own, None)
        assert torch.equal(total, own)


@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize("side", Side)
def test_vectors_of_zeros_are_not_kept(side, is_emulated):
    bucket = Bucket([*SHAPES, (1, 2100, 2500, 2)], torch.float32)
    half = bucket.half_step(side)
    dim = 2 if side is Side.LEFT else 1
    fresh = bucket.plan.factors(side, half.mean)
    for F in fresh:
        F.select(dim, -1)[-1] = 0
    with emulated() if is_emulated else nullcontext():
        compressor = bucket.compressor()
        kept = bucket.plan.factors(side, compressor.factors[side])
        before = [F.clone() for F in kept]
        compressor.store_factors(half, torch.tensor(False))
        assert all(map(torch.equal, kept, before))
        compressor.store_factors(half, torch.tensor(True))
    for found, new, old in zip(kept, fresh, before, strict=True):
        new.select(dim, -1)[-1] = old.select(dim, -1)[-1]
        assert torch.equal(found, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shapes", "count"),
    [(SHAPES, 6), ([*SHAPES, (1, 4096, 3, 2)], 6), ([*SHAPES, (1, 4097, 3, 2)], 8)],
)
def test_a_bucket_takes_one_launch_of_each_kind(monkeypatch, shapes, count, dtype):
    """Three for the bases, if there are tall factors."""
    launched = []
    monkeypatch.setattr(
        "commhooks.algorithms.lowrank.kernel_compressor.launch",
        lambda *a, **_: launched.append(a[1]),
    )
    with emulated():
        bucket = Bucket(shapes, dtype)
        compressor = bucket.compressor()
        half = bucket.half_step(Side.RIGHT)
        basis = compressor.orthonormalize(Side.LEFT, half.basis)
        own = compressor.project(Side.RIGHT, bucket.buffer, basis, has_exact=True)
        total, finite = compressor.message(Side.RIGHT, own, None)
        finite = compressor.average(total, 2, finite)
        compressor.apply([half], half, bucket.buffer, finite)
        compressor.store_factors(half, finite)
    assert len(launched) == count
    assert len(set(launched)) == count - (count > 6)
