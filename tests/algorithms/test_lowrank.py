"""The products of low-rank compression against float64, on awkward sizes."""

import pytest
import torch
from torch import Tensor

from commhooks.algorithms.lowrank.compressor import (
    apply_to_batch,
    deflate_batch,
    orthonormal_basis,
    project_batch,
)
from commhooks.algorithms.lowrank.matrix_plan import Side

# k, n, m, r: below, at and above the vector width, the blocks of rows and factors, and the panels.
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 5, 2),
    (3, 4, 16, 4),
    (1, 7, 33, 5),
    (2, 130, 67, 3),
    (1, 300, 513, 9),
    (1, 5, 1100, 4),
]


def matrices(k: int, n: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Errors, and gradients that lie apart as they do in a bucket."""
    generator = torch.Generator().manual_seed(k * n * m)
    apart = torch.randn(k, n * m + 3, generator=generator).to(dtype)
    error = torch.randn(k, n, m, generator=generator)
    return error, apart[:, : n * m].unflatten(1, (n, m))


def close(found: Tensor, exact: Tensor, terms: int) -> None:
    tolerance = 1e-6 * terms**0.5
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("side", Side)
def test_project(
    shape: tuple[int, int, int, int], has_error: bool, side: Side, threads: int
) -> None:
    k, n, m, r = shape
    E, G = matrices(k, n, m, torch.float32)
    M = G.double() + (E.double() if has_error else 0)
    P, Q = torch.randn(k, n, r), torch.randn(k, r, m)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if side is Side.LEFT:
            out = torch.full((k, n, r), torch.nan)
            project_batch(side, E if has_error else None, G, Q, out)
            close(out, M @ Q.double().mT, m)
        else:
            out = torch.full((k, r, m), torch.nan)
            project_batch(side, E if has_error else None, G, P, out)
            close(out, P.double().mT @ M, n)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply(shape: tuple[int, int, int, int], has_error: bool, dtype: torch.dtype) -> None:
    k, n, m, r = shape
    E, G = matrices(k, n, m, dtype)
    M = G.double() + E.double()
    P, Q = torch.randn(k, n, r), torch.randn(k, r, m)
    mean_P, mean_Q = torch.randn(k, n, r), torch.randn(k, r, m)
    apply_to_batch(E if has_error else None, G, (P, Q), (mean_P, mean_Q), torch.tensor(True))
    exact = mean_P.double() @ mean_Q.double()
    if dtype is torch.float32:
        close(G, exact, r)
    else:
        torch.testing.assert_close(G.double(), exact, rtol=2**-7, atol=1e-2)
    if has_error:
        close(E, M - P.double() @ Q.double(), r)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", Side)
def test_deflate(shape: tuple[int, int, int, int], side: Side) -> None:
    """The factors of M less a product, without that difference."""
    k, n, m, r = shape
    _, M = (tensor.double() for tensor in matrices(k, n, m, torch.float32))
    P, Q = torch.randn(k, n, 2 * r).double(), torch.randn(k, 2 * r, m).double()
    basis = torch.randn(k, r, m) if side is Side.LEFT else torch.randn(k, n, r)
    found, expected = (
        torch.empty(k, n, r) if side is Side.LEFT else torch.empty(k, r, m) for _ in range(2)
    )
    found, expected, basis = found.double(), expected.double(), basis.double()
    project_batch(side, None, M, basis, found)
    deflate_batch(side, P, Q, basis, found)
    project_batch(side, None, M - P @ Q, basis, expected)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("side", Side)
def test_orthonormalize_each_matrix_by_itself(side: Side) -> None:
    factor = torch.randn(3, 20, 4)
    factor[1] = 0
    factor[2, :, 2] = factor[2, :, 0]
    basis = orthonormal_basis(side, factor if side is Side.LEFT else factor.mT)
    columns = basis if side is Side.LEFT else basis.mT
    torch.testing.assert_close(columns.mT @ columns, torch.eye(4).expand(3, 4, 4))


def test_kernels_refuse_what_does_not_fit() -> None:
    E, G = matrices(2, 3, 5, torch.float32)
    with pytest.raises(RuntimeError, match=r"right factors of shape \[2, 2, 5\].*\[2, 2, 4\]"):
        project_batch(Side.LEFT, E, G, torch.randn(2, 2, 4), torch.empty(2, 3, 2))
    with pytest.raises(RuntimeError, match="error to be float32"):
        project_batch(Side.LEFT, E.double(), G, torch.randn(2, 2, 5), torch.empty(2, 3, 2))
