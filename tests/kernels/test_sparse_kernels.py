"""What sparse hooks send and keep, on a GPU: the same bytes and bits as on the CPU."""

import math

import pytest
import torch
from emulation import emulated
from emulation.sanitizer import run_sanitized
from support.matrix_buckets import every_kernel as every_lowrank_kernel
from support.sparse_parts import Received, part_of, written
from torch import Tensor

from commhooks.algorithms.sparse.gathered_parts import GatheredParts, gather
from commhooks.algorithms.sparse.index_code import IndexCode
from commhooks.algorithms.sparse.part import SparseLayout, SparsePart
from commhooks.algorithms.sparse.selection import (
    correct_momentum,
    draw_indices,
    scatter_add,
    select_above,
    select_largest,
)
from commhooks.codecs.finite import copy_if

SEGMENT = 4096
# Numbers of elements, and of those sent: none, one, all; plain bitmaps, and up to 20 low bits.
SIZES = [
    (1, 0), (1, 1), (5, 3), (64, 64), (1000, 1), (1000, 10), (1000, 400), (SEGMENT, 40),
    (SEGMENT + 1, 41), (30_000, 300), (30_001, 7_777), (2**31 - 1, 1), (10**9, 500),
]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(("numel", "count"), SIZES)
def test_messages_have_the_same_bytes(numel, count, is_backward):
    part = part_of(numel, count, torch.float16)
    for capacity in {part.count, min(numel, part.count + 9)}:
        layout = SparseLayout(numel, capacity, torch.float16)
        expected = layout.write(part)
        with emulated(is_backward):
            found = layout.write(part)
        assert torch.equal(found, expected)


def received(messages: Tensor, parts: list[SparsePart], numel: int, rank: int) -> GatheredParts:
    """What has arrived, on one of the ranks."""
    comm = Received(messages, rank)
    coroutine = gather(parts[rank], [part.count for part in parts], numel, comm)
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    return stop.value.value


def receive(messages: Tensor, parts: list[SparsePart], numel: int) -> tuple[bool, Tensor]:
    """The verdict and the mean, (numel,), of what has arrived."""
    gathered = received(messages, parts, numel, 0)
    buffer = torch.full((numel,), 7, dtype=parts[0].values.dtype)
    return bool(gathered.verdict), gathered.store_mean(buffer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("numel", "count"), [s for s in SIZES if s[0] < 10**6])
def test_means_have_the_same_bits(numel, count, ranks, dtype):
    """With other numbers of values on each rank, as thresholds have them."""
    counts = [max(0, count - 3 * rank) for rank in range(ranks)]
    parts = [part_of(numel, n, dtype, rank) for rank, n in enumerate(counts)]
    messages = written(parts, numel)
    expected = receive(messages, parts, numel)
    for is_backward in (False, True):
        with emulated(is_backward):
            found = receive(messages, parts, numel)
        assert found[0] is expected[0] is True
        assert torch.equal(found[1].view(torch.uint8), expected[1].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("verdict", [False, True])
@pytest.mark.parametrize(("numel", "count"), [s for s in SIZES if s[1] and s[0] < 10**6])
def test_what_is_left_has_the_same_bits(numel, count, verdict, rank, dtype):
    """With the mean in the memory of the sum, where they are of one dtype."""
    parts = [part_of(numel, max(0, count - r), dtype, r) for r in range(3)]
    wide = torch.promote_types(dtype, torch.float32)
    total, error = (torch.randn(numel, dtype=wide) for _ in range(2))
    expected = error.clone()
    if verdict:
        parts[rank].leave(total.clone(), expected, torch.tensor(True))
    else:
        parts[0].values[-1] = math.nan
    messages = written(parts, numel)
    buffer = total if total.dtype == dtype else total.to(dtype)
    with emulated():
        gathered = received(messages, parts, numel, rank)
        mean = gathered.end(parts[rank], total, error, buffer)
    assert torch.equal(error, expected)
    found, others = mean, receive(messages, parts, numel)[1]
    assert found.isnan().all() if not verdict else torch.equal(found, others)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite(dtype, bad):
    parts = [part_of(9000, 123, dtype, rank) for rank in range(3)]
    parts[1].values[-1] = bad
    with emulated():
        verdict, mean = receive(written(parts, 9000), parts, 9000)
    assert not verdict
    assert mean.isnan().all()


@pytest.mark.parametrize("byte", [0, 0xFF, 0xA5])
def test_damaged_messages_do_no_harm(byte):
    """Whatever arrives, nothing is read or written out of range."""
    parts = [part_of(9000, 123, torch.float32, rank) for rank in range(2)]
    messages = written(parts, 9000)
    messages[1, : IndexCode.shortest(9000, 123).nbytes] = byte
    with emulated():
        verdict, mean = receive(messages, parts, 9000)
    if byte:  # without any index a message is sound, and has no part in the mean
        assert not verdict
        assert mean.isnan().all()
    else:
        assert verdict
        assert torch.equal(mean, parts[0].dense(mean) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("numel", "count"), [s for s in SIZES if s[0] < 10**6])
def test_scatter_add(numel, count, dtype):
    part = part_of(numel, count, dtype)
    out = torch.randn(numel, dtype=dtype)
    expected = out.clone()
    scatter_add(part.values, part.indices, expected)
    with emulated():
        scatter_add(part.values, part.indices, out)
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
    """Up to one rounding of the product, which CPUs may round by itself."""
    g, u, v = (torch.randn(length, dtype=dtype) for _ in range(3))
    expected_u = g + momentum * u
    with emulated():
        total = correct_momentum(g, u, v, momentum)
    unit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(g, expected_u, rtol=unit, atol=unit)
    assert torch.equal(total, g + v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("length", [0, 1, 8, 4099])
def test_copies_depend_on_the_verdict(length, offset, dtype):
    source = torch.randn(length + offset).to(dtype)[offset:]
    memory = torch.zeros(length + offset + 8, dtype=dtype)
    out = memory[offset : offset + length]
    for verdict in (False, True):
        with emulated():
            copy_if(torch.tensor(verdict), source, out)
        assert torch.equal(out, source if verdict else torch.zeros_like(source))
    assert not memory[:offset].any()
    assert not memory[offset + length :].any()


def run_every_kernel() -> None:
    """On odd sizes, in memory of just the size that it must have, and on damaged messages."""
    for numel, count in ((1, 1), (33, 5), (9001, 90), (20_011, 7000)):
        gradient, error = torch.randn(numel), torch.randn(numel)
        total = correct_momentum(gradient, error, error.clone(), 0.9)
        select_above(gradient.clone(), error, 1.0)
        part = SparsePart.of(total, select_largest(total, error, count), torch.float32)
        part.leave(total, error, torch.tensor(True))
        messages = torch.stack([SparseLayout(numel, count, torch.float32).write(part)] * 2)
        receive(messages, [part, part], numel)
        messages[1] = 0xA5
        receive(messages, [part, part], numel)
        draw_indices(numel, count, torch.Generator(), like=total)
    every_lowrank_kernel()


def test_kernels_access_nothing_outside_of_their_tensors():
    assert run_sanitized(run_every_kernel) == ""
