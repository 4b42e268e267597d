"""Kernels of sparse hooks on a GPU: they give the same bytes and bits as the CPU."""

import math
from contextlib import nullcontext

import pytest
import torch
from emulation import emulated
from emulation.sanitizer import run_sanitized
from support.matrix_buckets import every_kernel as every_lowrank_kernel
from support.sparse_vectors import gathered, random_vector, written
from torch import Tensor

from commhooks.algorithms.sparse.dgc import correct_momentum
from commhooks.algorithms.sparse.messages import SparseVector, write_message
from commhooks.algorithms.sparse.selection import (
    draw_indices,
    scatter_add,
    select_above,
    select_largest,
)
from commhooks.codecs.finite import copy_if
from commhooks.codecs.index_code import IndexCode
from commhooks.precision import at_least_float32

SEGMENT = 4096
# Elements of the vector and of the part that is sent: none, one, all; plain bitmaps, and up to 20
# low bits.
SIZES = [
    (1, 0), (1, 1), (5, 3), (64, 64), (1000, 1), (1000, 10), (1000, 400), (SEGMENT, 40),
    (SEGMENT + 1, 41), (30_000, 300), (30_001, 7_777), (2**31 - 1, 1), (10**9, 500),
]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(("numel", "count"), SIZES)
def test_messages_have_the_same_bytes(numel, count, is_backward):
    vector = random_vector(numel, count, torch.float16)
    for capacity in {vector.count, min(numel, vector.count + 9)}:
        code = IndexCode.shortest(numel, capacity)
        expected = write_message(vector, code)
        with emulated(is_backward):
            found = write_message(vector, code)
        assert torch.equal(found, expected)


def receive(messages: Tensor, vectors: list[SparseVector]) -> tuple[bool, Tensor]:
    """Return whether all is finite, and the mean, on the first rank."""
    received = gathered(messages, vectors)
    buffer = torch.full((vectors[0].numel,), 7, dtype=vectors[0].values.dtype)
    all_finite = bool(received.all_finite)
    return all_finite, received.commit(buffer, None, buffer)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("numel", "count"), [s for s in SIZES if s[0] < 10**6])
def test_means_have_the_same_bits(numel, count, ranks, dtype):
    """Ranks send different numbers of values, as with a threshold."""
    counts = [max(0, count - 3 * rank) for rank in range(ranks)]
    vectors = [random_vector(numel, n, dtype, rank) for rank, n in enumerate(counts)]
    messages = written(vectors)
    expected = receive(messages, vectors)
    for is_backward in (False, True):
        with emulated(is_backward):
            found = receive(messages, vectors)
        assert found[0] is expected[0] is True
        assert torch.equal(found[1].view(torch.uint8), expected[1].view(torch.uint8))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("all_finite", [False, True])
@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize(("numel", "count"), [s for s in SIZES if s[1] and s[0] < 10**6])
def test_errors_have_the_same_bits(numel, count, is_emulated, all_finite, rank, dtype):
    """The mean is in the memory of the sum if they are of one dtype."""
    vectors = [random_vector(numel, max(0, count - r), dtype, r) for r in range(3)]
    total, error = (torch.randn(numel, dtype=at_least_float32(dtype)) for _ in range(2))
    expected = error.clone()
    if all_finite:
        expected = total - vectors[rank].dense(total.dtype)
    else:
        vectors[0].values[-1] = math.nan
    messages = written(vectors)
    buffer = total if total.dtype == dtype else total.to(dtype)
    with emulated() if is_emulated else nullcontext():
        mean = gathered(messages, vectors, rank).commit(total, error, buffer)
    assert mean is buffer
    assert torch.equal(error, expected)
    assert (
        mean.isnan().all() if not all_finite else torch.equal(mean, receive(messages, vectors)[1])
    )


def test_nothing_is_sent_if_no_rank_has_any_values():
    for context in (nullcontext(), emulated()):
        vectors = [random_vector(9000, 0, torch.float32, rank) for rank in range(3)]
        total = torch.randn(9000)
        error, expected = torch.zeros(9000), total.clone()
        with context:
            received = gathered(torch.full((3, 8), 0xA5, dtype=torch.uint8), vectors)
            mean = received.commit(total, error, total)
        assert received.all_finite
        assert torch.equal(mean, torch.zeros(9000))
        assert torch.equal(error, expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_value_makes_the_mean_nan(dtype, bad):
    vectors = [random_vector(9000, 123, dtype, rank) for rank in range(3)]
    vectors[1].values[-1] = bad
    with emulated():
        all_finite, mean = receive(written(vectors), vectors)
    assert not all_finite
    assert mean.isnan().all()


@pytest.mark.parametrize("byte", [0, 0xFF, 0xA5])
def test_damaged_messages_do_no_harm(byte):
    """Nothing is read or written out of range, whatever arrives."""
    vectors = [random_vector(9000, 123, torch.float32, rank) for rank in range(2)]
    messages = written(vectors)
    messages[1, : IndexCode.shortest(9000, 123).nbytes] = byte
    with emulated():
        all_finite, mean = receive(messages, vectors)
    if byte:  # a message without any index is intact, and adds nothing to the mean
        assert not all_finite
        assert mean.isnan().all()
    else:
        assert all_finite
        assert torch.equal(mean, vectors[0].dense(mean.dtype) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("numel", "count"), [s for s in SIZES if s[0] < 10**6])
def test_scatter_add(numel, count, dtype):
    vector = random_vector(numel, count, dtype)
    out = torch.randn(numel, dtype=dtype)
    expected = out.clone()
    scatter_add(vector.values, vector.indices, expected)
    with emulated():
        scatter_add(vector.values, vector.indices, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("numel", "count"), [s for s in SIZES if s[1] > 0])
def test_random_indices_are_the_same_everywhere(numel, count):
    for seed in range(5):
        expected, found = (
            torch.Generator().manual_seed(seed),
            torch.Generator().manual_seed(seed),
        )
        expected = draw_indices(numel, count, expected, like=torch.empty(0))
        with emulated():
            found = draw_indices(numel, count, found, like=torch.empty(0))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 3, 1023, 9001])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_correction(length, momentum, dtype):
    """The results may differ by the rounding of the product, which a CPU may round separately."""
    g, u, v = (torch.randn(length, dtype=dtype) for _ in range(3))
    expected_u = g + momentum * u
    with emulated():
        total = correct_momentum(g, u, v, momentum)
    unit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(g, expected_u, rtol=unit, atol=unit)
    assert torch.equal(total, g + v)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("length", [0, 1, 8, 4099])
def test_copies_depend_on_the_flag(length, offset, dtype):
    source = torch.randn(length + offset).to(dtype)[offset:]
    memory = torch.zeros(length + offset + 8, dtype=dtype)
    out = memory[offset : offset + length]
    for flag in (False, True):
        with emulated():
            copy_if(torch.tensor(flag), source, out)
        assert torch.equal(out, source if flag else torch.zeros_like(source))
    assert not memory[:offset].any()
    assert not memory[offset + length :].any()


def run_every_kernel() -> None:
    """Run them on odd sizes, in memory that ends where tensors do, and on damaged messages."""
    for numel, count in ((1, 1), (33, 5), (9001, 90), (20_011, 7000)):
        gradient, error = torch.randn(numel), torch.randn(numel)
        total = correct_momentum(gradient, error, error.clone(), 0.9)
        select_above(gradient.clone(), error, 1.0)
        vector = SparseVector.of(total, select_largest(total, error, count), torch.float32)
        scatter_add(-vector.values, vector.indices, total)
        copy_if(torch.tensor(True), total, error)
        messages = written([vector] * 2)
        receive(messages, [vector] * 2)
        messages[1] = 0xA5
        gathered(messages, [vector] * 2).commit(total, error, total)
        draw_indices(numel, count, torch.Generator(), like=total)
    every_lowrank_kernel()


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_kernels_access_nothing_outside_of_their_tensors():
    assert run_sanitized(run_every_kernel) == ""
