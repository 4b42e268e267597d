"""The kernels of sparse gradients on one thread, 152 MB of float32, 1 % of them sent.

`share_of_copy` is the bandwidth of a kernel, for the bytes that it must read and write, divided by
that of a plain copy in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.algorithms.sparse.base import SparseVector
from commhooks.algorithms.sparse.selection import scatter_add, select_above, select_largest
from commhooks.codecs.index_code import IndexCode

NUMEL = 38_000_000
COUNT = NUMEL // 100
ROUNDS = 15
WARM_UP = 2


@dataclass
class Case:
    """Normally distributed gradients, the selected ones, and their encoded form."""

    gradient: Tensor
    error: Tensor
    indices: Tensor
    values: Tensor
    code: IndexCode
    packed: Tensor


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    gradient, error = (torch.randn(NUMEL, generator=generator) for _ in range(2))
    indices = gradient.abs().topk(COUNT, sorted=False).indices.sort().values.int()
    code = IndexCode.shortest(NUMEL, COUNT)
    packed = torch.zeros(code.nbytes, dtype=torch.uint8)
    code.pack(indices, out=packed)
    yield Case(gradient, error, indices, gradient[indices.long()], code, packed)
    torch.set_num_threads(threads)


def measure(
    benchmark: Any, kernel: Callable[[], object], moved_bytes: int, like: Tensor, **extra: object
) -> None:
    """Time a kernel, and a plain copy next to each round."""
    target = torch.empty_like(like)
    copies: list[float] = []

    def copy_first() -> None:
        start = time.perf_counter()
        target.copy_(like)
        copies.append(time.perf_counter() - start)

    benchmark.pedantic(kernel, setup=copy_first, rounds=ROUNDS, warmup_rounds=WARM_UP, iterations=1)
    copy_bandwidth = 2 * like.nbytes / min(copies)
    bandwidth = moved_bytes / benchmark.stats.stats.min
    benchmark.extra_info.update(
        moved_bytes=moved_bytes,
        copy_gb_per_second=copy_bandwidth / 1e9,
        share_of_copy=bandwidth / copy_bandwidth,
        **extra,
    )


def same_magnitudes(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.abs().sort().values, expected.abs().sort().values)


@pytest.mark.benchmark(group="kernels")
@pytest.mark.parametrize("has_error", [False, True])
def test_topk_selection(benchmark: Any, case: Case, has_error: bool) -> None:
    """Select. With error feedback, this includes adding the error."""
    gradient = case.gradient.clone()
    error = case.error if has_error else None
    total = gradient + case.error if has_error else gradient
    expected = total.abs().topk(COUNT, sorted=False).values
    indices = select_largest(gradient, error, COUNT)
    assert torch.equal(gradient, total)
    assert same_magnitudes(gradient[indices.long()], expected)
    no_error = torch.zeros_like(gradient) if has_error else None  # so that all rounds are equal
    measure(
        benchmark,
        lambda: select_largest(gradient, no_error, COUNT),
        gradient.nbytes * (3 if has_error else 1),
        gradient,
        aim_seconds=0.040,
    )


@pytest.mark.benchmark(group="kernels")
def test_threshold_selection(benchmark: Any, case: Case) -> None:
    threshold = case.values.abs().min().item()
    assert torch.equal(select_above(case.gradient, None, threshold), case.indices)
    measure(
        benchmark,
        lambda: select_above(case.gradient, None, threshold),
        case.gradient.nbytes,
        case.gradient,
    )


@pytest.mark.benchmark(group="kernels")
def test_pack_indices(benchmark: Any, case: Case) -> None:
    assert torch.equal(case.code.unpack(case.packed), case.indices)
    moved_bytes = case.indices.nbytes + case.packed.nbytes
    measure(
        benchmark,
        lambda: case.code.pack(case.indices, out=case.packed),
        moved_bytes,
        case.gradient,
        bits_per_index=8 * case.code.nbytes / COUNT,
    )


@pytest.mark.benchmark(group="kernels")
def test_unpack_indices(benchmark: Any, case: Case) -> None:
    assert torch.equal(case.code.unpack(case.packed), case.indices)
    moved_bytes = case.indices.nbytes + case.packed.nbytes
    measure(benchmark, lambda: case.code.unpack(case.packed), moved_bytes, case.gradient)


CACHE_LINE = 64


@pytest.mark.benchmark(group="kernels")
def test_gather(benchmark: Any, case: Case) -> None:
    """Scatter numbers that are far apart: each costs a cache line."""

    def gather() -> SparseVector:
        return SparseVector.of(case.gradient, case.indices, torch.float32)

    assert torch.equal(gather().values, case.values)
    lines = case.indices.div(CACHE_LINE // 4, rounding_mode="floor").unique().numel()
    moved_bytes = lines * CACHE_LINE + case.indices.nbytes + case.values.nbytes
    measure(benchmark, gather, moved_bytes, case.gradient)


@pytest.mark.benchmark(group="kernels")
def test_scatter_add(benchmark: Any, case: Case) -> None:
    out = torch.zeros_like(case.gradient)
    scatter_add(case.values, case.indices, out)
    assert torch.equal(out, torch.zeros_like(out).index_add(0, case.indices, case.values))
    lines = case.indices.div(CACHE_LINE // 4, rounding_mode="floor").unique().numel()
    moved_bytes = 2 * lines * CACHE_LINE + case.indices.nbytes + case.values.nbytes
    measure(
        benchmark, lambda: scatter_add(case.values, case.indices, out), moved_bytes, case.gradient
    )


@pytest.mark.benchmark(group="kernels")
def test_keep_what_is_not_sent(benchmark: Any, case: Case) -> None:
    vector = SparseVector(case.indices, case.values, NUMEL)
    error = torch.empty_like(case.gradient)
    total = case.gradient.clone()

    def keep() -> None:
        vector.subtract_from(total)
        error.copy_(total)

    keep()
    assert torch.equal(error + vector.dense(error.dtype), case.gradient)
    measure(benchmark, keep, 2 * case.gradient.nbytes, case.gradient)
