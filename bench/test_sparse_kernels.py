"""The kernels of sparse gradients on one thread, 152 MB of float32, 1 % of them sent.

Each is measured in turn with a plain copy of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.copies import against_copy
from commhooks.algorithms.sparse.base import SparseVector
from commhooks.algorithms.sparse.selection import scatter_add, select_above, select_largest
from commhooks.codecs.index_code import IndexCode

NUMEL = 38_000_000
COUNT = NUMEL // 100
CACHE_LINE = 64


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


@pytest.mark.benchmark(group="kernels")
@pytest.mark.parametrize("has_error", [False, True])
def test_topk_selection(benchmark: Any, case: Case, has_error: bool) -> None:
    """Select. With error feedback, this includes adding the error."""
    gradient = case.gradient.clone()
    total = gradient + case.error if has_error else gradient
    expected = total.abs().topk(COUNT, sorted=False).values.sort().values
    indices = select_largest(gradient, case.error if has_error else None, COUNT)
    assert torch.equal(gradient, total)
    assert torch.equal(gradient[indices.long()].abs().sort().values, expected)
    no_error = torch.zeros_like(gradient) if has_error else None  # so that all rounds are equal
    moved_bytes = gradient.nbytes * (3 if has_error else 1)
    run = partial(select_largest, gradient, no_error, COUNT)
    against_copy(benchmark, run, moved_bytes, gradient, "40 ms")


@pytest.mark.benchmark(group="kernels")
@pytest.mark.parametrize(
    "name", ["select above", "pack indices", "unpack indices", "gather", "scatter add", "subtract"]
)
def test_sparse_kernel(benchmark: Any, case: Case, name: str) -> None:
    """Time a kernel whose result is verified first."""
    gradient, indices, values = case.gradient, case.indices, case.values
    # Selected numbers are far apart: each costs a cache line.
    lines = CACHE_LINE * indices.div(CACHE_LINE // 4, rounding_mode="floor").unique().numel()
    sent, packed = indices.nbytes + values.nbytes, indices.nbytes + case.packed.nbytes
    out, vector = torch.zeros_like(gradient), SparseVector(indices, values, NUMEL)
    threshold = values.abs().min().item()

    def subtract() -> Tensor:
        out.copy_(gradient)
        vector.subtract_from(out)
        return out

    run, expected, moved_bytes = {
        "select above": (
            partial(select_above, gradient, None, threshold),
            indices,
            gradient.nbytes,
        ),
        "pack indices": (
            lambda: case.code.pack(indices, out=case.packed) or case.packed,
            case.packed.clone(),
            packed,
        ),
        "unpack indices": (partial(case.code.unpack, case.packed), indices, packed),
        "gather": (
            lambda: SparseVector.of(gradient, indices, torch.float32).values,
            values,
            lines + sent,
        ),
        "scatter add": (
            lambda: scatter_add(values, indices, out) or out,
            torch.zeros_like(out).index_add(0, indices, values),
            2 * lines + sent,
        ),
        "subtract": (subtract, gradient - vector.dense(torch.float32), 2 * gradient.nbytes),
    }[name]
    assert torch.equal(run(), expected)
    against_copy(benchmark, run, moved_bytes, gradient, "none")
