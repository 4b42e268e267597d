"""Selection on a GPU: the same indices and bits as on the CPU, also for awkward numbers."""

import math

import pytest
import torch
from emulation import emulated
from support.awkward_gradients import KINDS, draw
from torch import Tensor

from commhooks import CommHookError
from commhooks.algorithms.sparse.selection import (
    add_and_check,
    select_above,
    select_largest,
    select_largest_of_chunks,
)
from commhooks.testing.compare import same_bits

CHUNK = 8192
# Zero, one; around the sizes of a vector, a word, a warp's vectors and a chunk; several chunks.
LENGTHS = [0, 1, 3, 31, 33, 127, 129, CHUNK - 1, CHUNK, CHUNK + 5, 3 * CHUNK + 77]
DTYPES = [torch.float32, torch.float64]


def check_largest(gradient: Tensor, error: Tensor | None, count: int, **order: bool) -> None:
    expected_sum = gradient.clone()
    expected = select_largest(expected_sum, error, count)
    with emulated(**order):
        found = select_largest(gradient, error, count)
    assert torch.equal(found, expected)
    assert same_bits(gradient, expected_sum)


@pytest.mark.covering(1)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_largest_of_chunks(kind, length):
    for count in (1, 20, 64):
        gradient, error = (draw(kind, length, torch.float32, seed=seed) for seed in range(2))
        expected_sum = gradient.clone()
        expected = select_largest_of_chunks(expected_sum, error, 64, count)
        with emulated():
            found = select_largest_of_chunks(gradient, error, 64, count)
        assert torch.equal(found, expected)
        assert same_bits(gradient, expected_sum)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_largest(kind, length, dtype, half):
    """Each half has all pairs of a share with a kind and with a length."""
    turn = KINDS.index(kind) + LENGTHS.index(length) + half
    for share in ((0.0, 0.3), (0.01, 1.0))[turn % 2]:
        count = round(share * length)
        error = draw("normal", length, dtype, seed=1) if share == 0.01 else None
        check_largest(draw(kind, length, dtype), error, count)


@pytest.mark.parametrize("kind", ["normal", "few values", "not finite"])
def test_largest_in_another_order_of_threads(kind):
    for count in (1, 500, 3 * CHUNK):
        error = draw("normal", 3 * CHUNK + 77, torch.float32, seed=1)
        check_largest(draw(kind, len(error), torch.float32), error, count, is_backward=True)


def test_largest_with_a_misleading_sample():
    """The sample misses the large elements, so that no or too few elements are marked."""
    length = 40_000
    samples = 16_384
    gradient = torch.full((length,), 0.001)
    hashes = torch.tensor([(i * 0x9E3779B97F4A7C15 & (2**64 - 1)) >> 32 for i in range(samples)])
    starts = torch.arange(samples + 1) * length // samples
    sampled = starts[:-1] + hashes % starts.diff()
    gradient[sampled] = torch.linspace(1, 2, samples)  # all sampled elements are large
    check_largest(gradient.clone(), None, samples // 2)
    check_largest(gradient.clone(), None, 30_000)
    check_largest(1 / gradient, None, 300)  # no large element is sampled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_largest_in_misaligned_memory(dtype, offset):
    memory = draw("normal", 5000 + offset, dtype)
    error = draw("normal", 5000 + offset, dtype, seed=1)
    check_largest(memory[offset:].clone(), error[offset:], 70)
    view, expected = memory.clone()[offset:], memory.clone()
    with emulated():
        found = select_largest(view, error[offset:], 70)
    assert torch.equal(found, select_largest(expected[offset:], error[offset:].clone(), 70))
    assert same_bits(view, expected[offset:])


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_above(kind, length, dtype):
    for threshold in (0.5, 1e-40, math.inf):
        error = draw("normal", length, dtype, seed=1) if threshold == 0.5 else None
        gradient, expected_sum = draw(kind, length, dtype), draw(kind, length, dtype)
        expected = select_above(expected_sum, error, threshold)
        with emulated():
            found = select_above(gradient, error, threshold)
        assert torch.equal(found, expected)
        assert same_bits(gradient, expected_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_sums_are_reported(kind, length, dtype):
    error = draw("normal", length, dtype, seed=1)
    gradient, expected_sum = draw(kind, length, dtype), draw(kind, length, dtype)
    expected = add_and_check(expected_sum, error)
    with emulated():
        found = add_and_check(gradient, error)
    assert torch.equal(found, expected)
    assert same_bits(gradient, expected_sum)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: select_largest(g, None, -1), "0 to 5 elements, found -1"),
        (lambda g: select_largest(g, None, 6), "0 to 5 elements, found 6"),
        (lambda g: select_largest(g.half(), None, 1), "float32 or float64.*float16"),
        (lambda g: select_largest(g, torch.zeros(4), 1), r"errors like.*\(5,\).*found \(4,\)"),
        (lambda g: select_above(g, g.double(), 1.0), "errors like"),
        (lambda g: select_above(g, None, math.nan), "threshold above 0, found nan"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with emulated(), pytest.raises(CommHookError, match=message):
        call(torch.zeros(5))
