"""Kernels of sparse and low-rank hooks on a GPU: the same indices, bytes and bits as on the CPU."""

import math

import pytest
import torch
from support.awkward_gradients import KINDS, draw
from support.matrix_buckets import Bucket, check_apply, check_products
from support.sparse_vectors import choose, gathered, random_vector, written
from torch import Tensor

from commhooks.algorithms.lowrank.matrix_plan import Side
from commhooks.algorithms.sparse.dgc import correct_momentum
from commhooks.algorithms.sparse.messages import SparseVector, write_message
from commhooks.algorithms.sparse.selection import (
    add_and_check,
    draw_indices,
    scatter_add,
    select_above,
    select_largest,
)
from commhooks.codecs.finite import copy_if
from commhooks.codecs.index_code import IndexCode
from commhooks.testing.compare import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Zero, one, less than a vector; several chunks. Small, because compute-sanitizer runs these tests.
LENGTHS = [0, 1, 3, 8197, 100_003]
SIZES = [(1, 1), (1000, 1), (30_001, 7_777), (100_003, 1_000)]
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_selection(kind, length, dtype):
    gradient, error = draw(kind, length, dtype), draw("normal", length, dtype, seed=1)
    for share in (0.01, 0.3, 1.0):
        expected_sum, found_sum = gradient.clone(), gradient.cuda()
        expected = select_largest(expected_sum, error, round(share * length))
        found = select_largest(found_sum, error.cuda(), round(share * length))
        assert torch.equal(found.cpu(), expected)
        both = found_sum.cpu().isnan() & expected_sum.isnan()  # with any payload
        assert same_bits(found_sum.cpu().masked_fill(both, 0), expected_sum.masked_fill(both, 0))
    for threshold in (0.5, math.inf):
        expected = select_above(gradient.clone(), None, threshold)
        assert torch.equal(select_above(gradient.cuda(), None, threshold).cpu(), expected)
    found = add_and_check(gradient.cuda(), None)
    assert torch.equal(found.cpu(), add_and_check(gradient, None))


def cuda(vector: SparseVector) -> SparseVector:
    return SparseVector(vector.indices.cuda(), vector.values.cuda(), vector.numel)


def mean_of(messages: Tensor, vectors: list[SparseVector]) -> tuple[bool, Tensor]:
    received = gathered(messages, vectors)
    buffer = vectors[0].values.new_full((vectors[0].numel,), 7)
    all_finite = bool(received.all_finite)
    return all_finite, received.commit(buffer, None, buffer).cpu()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("numel", "count"), SIZES)
def test_messages_and_means(numel, count, dtype):
    counts = [max(0, count - 3 * rank) for rank in range(3)]
    vectors = [random_vector(numel, n, dtype, rank) for rank, n in enumerate(counts)]
    code = IndexCode.shortest(numel, count)
    expected = write_message(vectors[0], code)
    assert torch.equal(write_message(cuda(vectors[0]), code).cpu(), expected)
    messages = written(vectors)
    expected = mean_of(messages, vectors)
    found = mean_of(messages.cuda(), list(map(cuda, vectors)))
    assert found[0]
    assert same_bits(found[1], expected[1])
    vectors[0].values[0] = math.nan
    all_finite, mean = mean_of(written(vectors).cuda(), list(map(cuda, vectors)))
    assert not all_finite
    assert mean.isnan().all()


@pytest.mark.parametrize(("numel", "count"), SIZES)
def test_drawing_and_adding(numel, count):
    of_devices = [
        draw_indices(numel, count, torch.Generator().manual_seed(3), like=torch.empty(0).to(device))
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(of_devices[0], of_devices[1].cpu())
    values, out, indices = torch.randn(count), torch.randn(numel), choose(numel, count)
    found = out.cuda()
    scatter_add(values.cuda(), indices.cuda(), found)
    scatter_add(values, indices, out)
    assert torch.equal(found.cpu(), out)
    for flag in (False, True):
        target = torch.zeros(numel, device="cuda")
        copy_if(torch.tensor(flag, device="cuda"), found, target)
        assert torch.equal(target, found * flag)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_momentum_correction(length, dtype):
    g, u, v = (torch.randn(length, dtype=dtype, device="cuda") for _ in range(3))
    expected = g + 0.9 * u
    total = correct_momentum(g, u, v, 0.9)
    unit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(g, expected, rtol=unit, atol=unit)
    assert torch.equal(total, g + v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", Side)
def test_bases_are_orthonormal(side, dtype):
    tall = [(1, 1, 1, 1), (3, 768, 9, 4), (1, 5003, 9, 4), (2, 600, 9, 9)]
    shapes = [(k, n, m, r) if side is Side.LEFT else (k, m, n, r) for k, n, m, r in tall]
    bucket = Bucket(shapes, dtype, device="cuda")
    flat = bucket.factors(side)
    factors = bucket.plan.factors(side, flat)
    vectors = 2 if side is Side.LEFT else 1
    for F in factors[1:]:
        F.select(vectors, -1).copy_(F.select(vectors, 0))
    tolerance = 1000 * torch.finfo(dtype).eps
    bases = bucket.plan.factors(side, bucket.compressor().orthonormalize(side, flat))
    for basis, F in zip(bases, factors, strict=True):
        Q, columns = (T.double() if side is Side.LEFT else T.double().mT for T in (basis, F))
        identity = torch.eye(Q.shape[2], device="cuda").double().expand(Q.shape[0], -1, -1)
        torch.testing.assert_close(Q.mT @ Q, identity, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            Q @ (Q.mT @ columns), columns, rtol=tolerance, atol=100 * tolerance
        )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [4, 16, 20])
@pytest.mark.parametrize("side", Side)
def test_products(side, rank, dtype):
    shapes = [(1, 1, 1, 1), (3, 70, 131, rank), (2, 768, 2304, rank)]
    check_products(Bucket(shapes, dtype, device="cuda"), side, has_exact=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("sides", [[Side.RIGHT], [Side.RIGHT, Side.LEFT]])
def test_end_of_a_step(sides, finite, dtype):
    shapes = [(1, 1, 1, 1), (3, 70, 131, 5), (2, 768, 2304, 4)]
    check_apply(Bucket(shapes, dtype, device="cuda"), sides, finite)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_low_rank_compression_sends_and_keeps(dtype):
    bucket = Bucket([(2, 300, 77, 4), (1, 5000, 9, 3)], dtype, device="cuda")
    compressor = bucket.compressor()
    sent = bucket.plan.factor_elements[Side.RIGHT]
    for number in (0.5, math.inf, 0.9 * torch.finfo(dtype).max):
        half = bucket.half_step(Side.RIGHT)
        kept = compressor.factors[Side.RIGHT]
        half.mean[sent - 1] = number
        before = kept.clone()
        total, finite = compressor.message(Side.RIGHT, half.mean, None)
        finite = compressor.average(total.mul_(2), 2, finite)
        assert finite == (number == 0.5)
        compressor.store_factors(half, finite)
        assert torch.equal(kept, half.mean[:sent] if finite else before)
