"""Low-rank compression on a GPU: against float64 and against the CPU, on awkward sizes."""

import pytest
import torch
from emulation import emulated
from torch import Tensor

from commhooks.algorithms.lowrank import absorb, orthonormalise, project
from commhooks.algorithms.matrix_plan import Side

# k, n, m, r: below, at and above vectors, rows that are handled together, and blocks.
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 5, 2),
    (3, 4, 16, 4),
    (1, 7, 33, 5),
    (2, 130, 68, 3),
    (1, 700, 1030, 9),
]
DTYPES = [torch.float32, torch.float64]


def matrices(k: int, n: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Errors, and gradients that lie apart as they do in a bucket."""
    generator = torch.Generator().manual_seed(k * n * m)
    apart = torch.randn(k, n * m + 3, generator=generator).to(dtype)
    error = torch.randn(k, n, m, generator=generator).to(dtype)
    return error, apart[:, : n * m].unflatten(1, (n, m))


def close(found: Tensor, exact: Tensor, terms: int) -> None:
    tolerance = 8 * torch.finfo(found.dtype).eps * terms**0.5
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=4 * tolerance)


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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("verdict", [False, True])
def test_absorb(shape, has_error, verdict, dtype):
    k, n, m, r = shape
    E, G = matrices(k, n, m, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    E = E.to(wide) if has_error else None
    own, mean = (
        (torch.randn(k, n, r, dtype=wide), torch.randn(k, r, m, dtype=wide)) for _ in range(2)
    )
    if not verdict:
        G[0, -1, -1] = torch.inf
        own[1][0, 0, 0] = torch.nan
    between = G.as_strided((k - 1, 3), (G.stride(0), 1), n * m).clone()
    sent, average = (P.double() @ Q.double() for P, Q in (own, mean))
    error = None if E is None else E.double() + (G.double() - sent if verdict else 0)
    with emulated():
        absorb(E, G, own, mean, torch.tensor(verdict))
    if error is not None:
        close(E, error, r + 2)
    if not verdict:
        assert G.isnan().all()
    elif dtype in DTYPES:
        close(G, average, r + 2)
    else:
        torch.testing.assert_close(G.double(), average, rtol=2**-7, atol=1e-2)
    assert torch.equal(G.as_strided((k - 1, 3), (G.stride(0), 1), n * m), between)


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 4), (2, 5, 1), (2, 700, 4), (1, 600, 9)])
@pytest.mark.parametrize("side", Side)
def test_bases_are_those_of_lapack(side, shape, dtype, is_backward):
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    factor = columns if side is Side.LEFT else columns.mT.contiguous()
    expected = orthonormalise(side, factor)
    with emulated(is_backward):
        found = orthonormalise(side, factor)
    assert found.is_contiguous()
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bases_of_dependent_columns_are_orthonormal_all_the_same(dtype):
    columns = torch.randn(6, 30, 3, dtype=dtype)
    columns[1] = 0
    columns[2, :, 1] = 0
    columns[3] *= 1e-30
    columns[3, :, 2] = columns[3, :, 0]
    columns[4, 1:] = 0
    columns[5] *= 1e33 if dtype == torch.float32 else 1e150
    with emulated():
        basis = orthonormalise(Side.LEFT, columns)
    tolerance = 100 * torch.finfo(dtype).eps
    identity = torch.eye(3, dtype=dtype).expand(6, 3, 3)
    torch.testing.assert_close(basis.mT @ basis, identity, rtol=tolerance, atol=tolerance)


def test_bases_of_what_is_not_finite_are_not_finite():
    columns = torch.randn(2, 30, 3)
    columns[1, 17, 1] = torch.nan
    with emulated():
        basis = orthonormalise(Side.LEFT, columns)
    assert basis[0].isfinite().all()
    assert basis[1].isnan().any()
