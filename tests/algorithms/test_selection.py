"""Selection of elements: compiled loops against NumPy in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from commhooks.algorithms.sparse.selection import (
    add_and_check,
    scatter_add,
    select_above,
    select_largest,
    select_largest_of_chunks,
)

pytestmark = pytest.mark.usefixtures("two_threads")

AWKWARD = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 1.1754944e-38, math.inf, -math.inf, math.nan, 3e38]
DTYPES = [np.float32, np.float64]


def numbers(dtype: type) -> st.SearchStrategy[float]:
    """Draw many equal numbers, many awkward ones, and arbitrary ones."""
    few = st.sampled_from([np.dtype(dtype).type(value).item() for value in AWKWARD])
    return few | st.floats(width=np.dtype(dtype).itemsize * 8)


@st.composite
def gradients(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    """Draw a gradient and possibly an error, at any alignment."""
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.integers(0, 300))
    offsets = [draw(st.integers(0, 17)) for _ in range(2)]
    arrays = [draw(hnp.arrays(dtype, length, elements=numbers(dtype))) for _ in range(2)]
    for array in arrays:
        array[np.isnan(array)] = np.nan  # others may count as larger than this one
    gradient, error = (
        torch.from_numpy(np.concatenate([np.zeros(offset, dtype), array]))[offset:]
        for offset, array in zip(offsets, arrays, strict=True)
    )
    return gradient, error if draw(st.booleans()) else None


def sum_of(gradient: Tensor, error: Tensor | None) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gradient.numpy() + (0 if error is None else error.numpy())


def largest(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the largest: NaN first, then by magnitude, then by index."""
    magnitude = np.abs(numbers.astype(np.float64))
    is_nan = np.isnan(magnitude)
    order = np.lexsort((np.arange(len(numbers)), -np.where(is_nan, 0, magnitude), ~is_nan))
    return np.sort(order[:count])


def above(numbers: np.ndarray, threshold: float) -> np.ndarray:
    magnitude = np.abs(numbers.astype(np.float64))
    return np.flatnonzero(np.isnan(magnitude) | (magnitude >= numbers.dtype.type(threshold)))


@given(gradients(), st.floats(0, 1))
def test_largest(pair, share):
    gradient, error = pair
    count = round(share * gradient.numel())
    total = sum_of(*pair)
    found = select_largest(gradient, error, count)
    np.testing.assert_array_equal(gradient.numpy(), total)  # NaN equals NaN here
    np.testing.assert_array_equal(found.numpy(), largest(total, count))
    assert found.dtype == torch.int32


def largest_of_chunks(numbers: np.ndarray, chunk: int, count: int) -> np.ndarray:
    starts = range(0, len(numbers), chunk)
    found = [start + largest(numbers[start : start + chunk], count) for start in starts]
    return np.concatenate([np.empty(0, np.int64), *found])


@given(gradients(), st.integers(1, 100), st.floats(0, 1))
def test_largest_of_chunks(pair, chunk, share):
    gradient, error = pair
    count = max(1, round(share * chunk))
    total = sum_of(*pair)
    found = select_largest_of_chunks(gradient, error, chunk, count)
    np.testing.assert_array_equal(gradient.numpy(), total)
    np.testing.assert_array_equal(found.numpy(), largest_of_chunks(total, chunk, count))
    assert found.dtype == torch.int32


@given(gradients(), st.sampled_from([1e-45, 1e-40, 1e-300, 0.5, 1.0, 3e38]) | st.floats(1e-3, 1e3))
def test_above(pair, threshold):
    gradient, error = pair
    total = sum_of(*pair)
    found = select_above(gradient, error, threshold)
    np.testing.assert_array_equal(gradient.numpy(), total)
    expected = above(total, threshold)
    if total.dtype.type(threshold) == 0:
        expected = np.flatnonzero(total != 0)  # a threshold too small for the dtype: no zeros
    np.testing.assert_array_equal(found.numpy(), expected)


@given(gradients())
def test_non_finite_sums_are_reported(pair):
    total = sum_of(*pair)
    assert add_and_check(*pair).item() == (not np.isfinite(total).all())
    np.testing.assert_array_equal(pair[0].numpy(), total)


SIZE = 300_007  # more than one chunk per thread, more than is sampled, no multiple of anything


def large(kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    uniform = torch.rand(SIZE, generator=generator, dtype=torch.float64)
    made = {
        "normal": lambda: normal,
        "signs": lambda: normal.sign(),
        "zeros": lambda: torch.zeros(SIZE),
        "mostly zeros": lambda: normal * (uniform < 0.002),
        "one layer much larger": lambda: normal * torch.where(torch.arange(SIZE) < 4000, 1e6, 1),
        "periodic": lambda: normal * (torch.arange(SIZE) % 64 == 0),
        "few values": lambda: normal.bfloat16(),
        "rising": lambda: torch.arange(SIZE),
        "one NaN": lambda: torch.where(torch.arange(SIZE) == 270_000, math.nan, normal),
    }
    return made[kind]().to(dtype)


KINDS = [
    "normal",
    "signs",
    "zeros",
    "mostly zeros",
    "one layer much larger",
    "periodic",
    "few values",
    "rising",
    "one NaN",
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 300, 3000, 150_000, SIZE])
@pytest.mark.parametrize("kind", KINDS)
def test_largest_of_many(kind, count, dtype, threads):
    """The bound from a sample is too low, too high, or reached by too many elements."""
    gradient = large(kind, dtype)
    error = gradient.flip(0) / 2
    total = sum_of(gradient, error)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = select_largest(gradient, error, count)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(found.numpy(), largest(total, count))


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [1, 64, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_largest_of_many_chunks(kind, count):
    """The bound from the previous chunk is too low, too high, or reached by too many elements."""
    gradient = large(kind, torch.float32)
    error = gradient.flip(0) / 2
    total = sum_of(gradient, error)
    found = select_largest_of_chunks(gradient, error, 4096, count)
    np.testing.assert_array_equal(found.numpy(), largest_of_chunks(total, 4096, count))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
@example((600_000, set(range(0, 600_000, 7))))
def test_scatter_add(case):
    numel, chosen = case
    indices = torch.tensor(sorted(chosen), dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        out = torch.randn(numel, dtype=dtype)
        values = torch.randn(len(chosen), dtype=dtype)
        expected = out.numpy().copy()
        np.add.at(expected, indices.numpy(), values.numpy())
        scatter_add(values, indices, out)
        np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: select_largest(g, None, -1), "0 to 5 elements, found -1"),
        (lambda g: select_largest(g, None, 6), "0 to 5 elements, found 6"),
        (lambda g: select_largest(g.half(), None, 1), "float32 or float64.*float16"),
        (lambda g: select_largest(torch.zeros(5, 2)[:, 0], None, 1), r"strides \(2,\)"),
        (lambda g: select_largest(g, torch.zeros(4), 1), r"like the numbers, \(5,\).*found \(4,\)"),
        (lambda g: select_largest_of_chunks(g, None, 3, 4), "1 to 3 elements of each, found 4"),
        (lambda g: select_above(g, g.double(), 1.0), "errors like the numbers"),
        (lambda g: select_above(g, None, math.nan), "threshold above 0, found nan"),
        (
            lambda g: scatter_add(g, torch.tensor([1]), g),
            "at indices in torch.int32, found .* torch.int64",
        ),
        (lambda g: scatter_add(g[:1], torch.tensor([5]).int(), g), r"ndices below 5, found \[5"),
        (lambda g: scatter_add(g[:2], torch.tensor([1]).int(), g), "as many values as indices"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.zeros(5))
