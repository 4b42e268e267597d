"""Low-rank compression on a GPU: against float64 and against the CPU, on awkward sizes."""

from contextlib import nullcontext

import pytest
import torch
from emulation import emulated
from support.matrix_buckets import DTYPES, Bucket, check_absorb, check_products, close
from torch import Tensor

from commhooks.algorithms.lowrank.bucket import HalfStep, arithmetic_of
from commhooks.algorithms.lowrank.matrix_memory import MatrixMemory
from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, Side
from commhooks.algorithms.lowrank.payload import Payload
from commhooks.algorithms.lowrank.products import project
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
        project(side, E, G, basis, out)
    B = basis.double().mT
    close(out, M @ B if side is Side.LEFT else B @ M, 2 * max(n, m))


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


@pytest.mark.parametrize("dtype", [*DTYPES, *HALVES])
@pytest.mark.parametrize("sides", [[Side.LEFT], [Side.RIGHT], [Side.RIGHT, Side.LEFT]])
@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("verdict", [False, True])
def test_absorb(sides, has_error, verdict, dtype):
    with emulated():
        check_absorb(Bucket(SHAPES, dtype, has_error=has_error), sides, verdict)


@pytest.mark.parametrize("has_error", [False, True])
def test_what_half_precision_has_no_range_for_goes_to_errors(has_error):
    """On the CPU and, by kernels, on a GPU."""
    found = []
    for context in (nullcontext(), emulated()):
        torch.manual_seed(0)
        bucket = Bucket(SHAPES, torch.float16, has_error=has_error)
        half = bucket.half_step(Side.RIGHT)
        for pair in half.mean_pairs:
            pair[1].mul_(1e5)
        with context:
            bucket.arithmetic.absorb([half], half.mean, bucket.buffer)
        found.append((bucket.buffer, bucket.memory.error))
        for G, E, (P, Q) in zip(
            bucket.plan.views(bucket.buffer), bucket.memory.errors, half.mean_pairs, strict=True
        ):
            assert G.isfinite().all()
            if E is not None:
                beyond = (P @ Q).abs() > 1.1 * torch.finfo(torch.float16).max
                assert beyond.any() or G.numel() < 9
                assert (E.abs()[beyond] > 1e3).all()
    (buffer, error), (of_kernels, error_of_kernels) = found
    torch.testing.assert_close(of_kernels, buffer)
    torch.testing.assert_close(error_of_kernels, error, rtol=1e-4, atol=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("verdict", [False, True])
def test_absorb_beyond_the_ranks_of_kernels(verdict, dtype):
    with emulated():
        check_absorb(Bucket([(2, 258, 260, 257)], dtype), [Side.RIGHT], verdict)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_widened_and_narrowed_as_torch_does(dtype):
    """All of them, what lies between two neighbors, and what is beyond the largest."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    halves = bits.view(dtype)
    finite = halves[halves.isfinite()].float().sort().values
    between = (finite[:-1] + finite[1:]) / 2
    largest = torch.finfo(dtype).max * torch.tensor([1 + 2**-13, 1 + 2**-10, 1.002, 1.01])
    numbers = torch.cat([
        halves.float(), between, *(between.nextafter(torch.tensor(s)) for s in (-1e38, 1e38)),
        largest, -largest, torch.tensor([2**-149, -(2**-149), 3e38, torch.inf, torch.nan]),
    ])  # fmt: skip
    plan = MatrixPlan((), ((0, numbers.numel()),))
    buffer = numbers.to(dtype)
    memory = MatrixMemory(plan, {}, sides=(), error_feedback=False, seed=0, like=numbers[:0])
    mean = Payload(plan, Side.LEFT, numbers, has_exact=True)
    with emulated():
        arithmetic = arithmetic_of(plan, memory, buffer, numbers[:0])
        nothing = Payload.empty(plan, Side.RIGHT, has_exact=False, like=numbers)
        widened = arithmetic.project(buffer, nothing, has_exact=True).exact
        assert same_bits(widened.nan_to_num(9.0), buffer.float().nan_to_num(9.0))
        narrowed = torch.empty_like(buffer)
        half = HalfStep(nothing, mean, mean, torch.tensor(True), is_sent=True)
        arithmetic.absorb([half], mean, narrowed)
    assert torch.equal(narrowed.isnan(), buffer.isnan())
    assert same_bits(narrowed[~buffer.isnan()], buffer[~buffer.isnan()])


# Rows, no more columns than rows.
TALL = [(1, 1, 1, 1), (3, 4, 4, 4), (2, 5, 5, 1), (2, 700, 6, 4), (1, 600, 9, 9)]


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", Side)
def test_bases_are_those_of_lapack(side, dtype, is_backward):
    shapes = [(k, n, m, r) if side is Side.LEFT else (k, m, n, r) for k, n, m, r in TALL]
    bucket = Bucket(shapes, dtype)
    factors = bucket.factors(side)
    before = factors.flat.clone()
    expected = bucket.arithmetic.orthonormalize(factors)
    with emulated(is_backward):
        found = bucket.arithmetic.orthonormalize(factors)
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.flat, expected.flat, rtol=tolerance, atol=tolerance)
    assert torch.equal(factors.flat, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bases_of_dependent_columns_are_orthonormal_all_the_same(dtype):
    bucket = Bucket([(6, 30, 9, 3)], dtype)
    factors = bucket.factors(Side.LEFT)
    columns = factors.factors[0]
    columns[1] = 0
    columns[2, :, 1] = 0
    columns[3] *= 1e-30
    columns[3, :, 2] = columns[3, :, 0]
    columns[4, 1:] = 0
    columns[5] *= 1e33 if dtype == torch.float32 else 1e150
    with emulated():
        basis = bucket.arithmetic.orthonormalize(factors).factors[0]
    tolerance = 100 * torch.finfo(dtype).eps
    identity = torch.eye(3, dtype=dtype).expand(6, 3, 3)
    torch.testing.assert_close(basis.mT @ basis, identity, rtol=tolerance, atol=tolerance)


def test_bases_of_what_is_not_finite_are_not_finite():
    bucket = Bucket([(2, 30, 9, 3)], torch.float32)
    factors = bucket.factors(Side.LEFT)
    factors.factors[0][1, 17, 1] = torch.nan
    with emulated():
        basis = bucket.arithmetic.orthonormalize(factors).factors[0]
    assert basis[0].isfinite().all()
    assert basis[1].isnan().any()


@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3, 4096, 4099])
def test_what_is_sent_and_received(numel, dtype, is_emulated):
    numbers = torch.randn(numel, dtype=dtype)
    own = Payload(MatrixPlan((), ((0, numel),)), Side.LEFT, numbers, has_exact=True)
    largest = torch.finfo(dtype).max / 2**16
    with emulated() if is_emulated else nullcontext():
        arithmetic = Bucket([], dtype).arithmetic
        total, verdict = arithmetic.send(own, None)
        assert torch.equal(total, numbers)
        assert total.data_ptr() != numbers.data_ptr() or numel == 0
        verdict = arithmetic.receive(total.mul_(3), 3, verdict)
        torch.testing.assert_close(total, numbers)
        assert verdict
        for number in (torch.inf, -torch.inf, torch.nan, -2 * largest) if numel else ():
            numbers[-1] = number
            total, verdict = arithmetic.send(own, torch.tensor(True))
            expected = [False] * (numel - 1) + [True]
            assert total.isnan().tolist() == numbers.isnan().tolist() == expected
            verdict = arithmetic.receive(total, 3, verdict)
            assert not verdict
            assert not arithmetic.receive(torch.ones(3, dtype=dtype), 3, verdict)
        numbers.fill_(-largest)
        total, verdict = arithmetic.send(own, None)
        assert torch.equal(total, numbers)


@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize("side", Side)
def test_vectors_of_zeros_are_not_kept(side, is_emulated):
    bucket = Bucket(SHAPES, torch.float32)
    fresh, kept = bucket.factors(side), bucket.factors(side)
    dim = 2 if side is Side.LEFT else 1
    for F in fresh.factors:
        F.select(dim, -1)[-1] = 0
    before = [F.clone() for F in kept.factors]
    with emulated() if is_emulated else nullcontext():
        bucket.arithmetic.keep(fresh, kept, torch.tensor(False))
        assert all(map(torch.equal, kept.factors, before))
        bucket.arithmetic.keep(fresh, kept, torch.tensor(True))
    for found, new, old in zip(kept.factors, fresh.factors, before, strict=True):
        new.select(dim, -1)[-1] = old.select(dim, -1)[-1]
        assert torch.equal(found, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_takes_one_launch_of_each_kind(monkeypatch, dtype):
    launched = []
    monkeypatch.setattr("commhooks.kernels.lowrank.launch", lambda *a, **_: launched.append(a[1]))
    with emulated():
        bucket = Bucket(SHAPES, dtype)
        arithmetic = bucket.arithmetic
        half = bucket.half_step(Side.RIGHT)
        basis = arithmetic.orthonormalize(half.own)
        own = arithmetic.project(bucket.buffer, basis, has_exact=True)
        total, verdict = arithmetic.send(own, None)
        arithmetic.receive(total, 2, verdict)
        arithmetic.absorb([half], half.mean, bucket.buffer)
        arithmetic.keep(half.mean, half.own, half.verdict)
    assert len(set(launched)) == len(launched) == 6
