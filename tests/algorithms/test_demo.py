"""demo: the algorithm of its docstring, the transform, and the same bits on all ranks."""

import math
import textwrap

import pytest
import torch
from support.lockstep import lockstep, make_bucket
from torch import Tensor

from commhooks.algorithms.sparse import demo
from commhooks.algorithms.sparse.demo import DeMo, dct_matrix, from_frequencies, to_frequencies
from commhooks.algorithms.sparse.messages import gather_bytes

SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (13,),
    "matrix": (16, 24),
    "empty": (0, 3),
    "scalar": (),
    "odd": (22, 9),
    "convolution": (12, 4, 3, 3),
}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


# ------------------------------------------------------------------------------- the transform


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_matrix_is_the_orthonormal_dct(size):
    matrix = dct_matrix(size, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    for frequency in range(size):
        scale = math.sqrt((1 if frequency == 0 else 2) / size)
        for position in (0, size - 1):
            cosine = math.cos(math.pi * frequency * (2 * position + 1) / (2 * size))
            assert matrix[frequency, position].item() == pytest.approx(scale * cosine, abs=1e-12)


@pytest.mark.parametrize("side", [1, 8, 64])
def test_transform_keeps_lengths_and_has_an_inverse(side):
    tensors = [tensor.double() for tensor in gradients_of(0, 0).values()]
    tensors[-1] = tensors[-1].contiguous(memory_format=torch.channels_last)
    found = to_frequencies(tensors, side)
    assert found.shape == (NUMEL,)
    norm = torch.cat([tensor.flatten() for tensor in tensors]).norm()
    torch.testing.assert_close(found.norm(), norm)
    back = [torch.full_like(tensor, math.nan) for tensor in tensors]
    from_frequencies(found, back, side)
    torch.testing.assert_close(back, tensors)


def test_smooth_tiles_have_few_frequencies():
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    wave = torch.cos(math.pi / 8 * 3 * (rows + 0.5)) * torch.cos(math.pi / 8 * 2 * (columns + 0.5))
    matrix = torch.zeros(16, 24)
    matrix[8:, 16:] = wave  # the last of 2 x 3 tiles
    found = to_frequencies([torch.ones(5), matrix], 8)  # the full tiles come first
    assert (found.abs() > 1e-5).nonzero().flatten().tolist() == [5 * 64 + 3 * 8 + 2, 6 * 64]


# ------------------------------------------------------------------------------- the algorithm


def transform(matrix: Tensor, *, inverse: bool = False) -> Tensor:
    """Transform the tiles of 8 by 8 of a matrix one by one."""
    dct = dct_matrix(8, matrix.dtype, matrix.device)
    dct = dct.T if inverse else dct
    out = torch.empty_like(matrix)
    for row in range(0, matrix.shape[0], 8):
        for column in range(0, matrix.shape[1], 8):
            tile = matrix[row : row + 8, column : column + 8]
            out[row : row + 8, column : column + 8] = dct @ tile @ dct.T
    return out


def top(coefficients: Tensor, k: int) -> Tensor:
    """Keep the k largest coefficients of each tile."""
    out = torch.zeros_like(coefficients)
    for row in range(0, coefficients.shape[0], 8):
        for column in range(0, coefficients.shape[1], 8):
            tile = coefficients[row : row + 8, column : column + 8]
            kept = tile.abs() >= tile.abs().flatten().topk(k).values[-1]
            out[row : row + 8, column : column + 8] = tile * kept
    return out


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_documented_algorithm_gives_the_results_and_the_momenta(size, sign):
    text = (demo.__doc__ or "").partition("::\n\n")[2].partition("\n\nPeng")[0]
    hooks = [DeMo(density=5 / 64, tile=8, decay=0.75, sign=sign) for _ in range(size)]
    names = {
        "N": size,
        "decay": 0.75,
        "dct": transform,
        "idct": lambda coefficients: transform(coefficients, inverse=True),
        "top": lambda coefficients: top(coefficients, 5),
        "q": [torch.empty(0)] * size,
        "m": [torch.zeros(16, 24) for _ in range(size)],
    }
    for step in range(4):
        gradients = [gradients_of(rank, step)["matrix"] for rank in range(size)]
        results, _ = lockstep(hooks, [make_bucket({"p": g.clone()}, step) for g in gradients])
        names |= {"g": gradients}
        exec(textwrap.dedent(text), names)
        expected = names["result"].sign() if sign else names["result"]
        for result in results:
            assert torch.equal(result, results[0])
            torch.testing.assert_close(result, expected.flatten(), rtol=1e-4, atol=1e-5)
        for momentum, hook in zip(names["m"], hooks, strict=True):
            found = hook.state["p"]["momentum"]
            torch.testing.assert_close(found, momentum, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_nothing_is_lost_but_by_decay(dtype):
    hooks = [DeMo(density=0.1, tile=8, decay=0.5) for _ in range(3)]
    old = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(3):
        buckets = [make_bucket(gradients_of(rank, step, dtype), step) for rank in range(3)]
        mean = torch.stack([bucket.buffer().double() for bucket in buckets]).mean(0)
        results, _ = lockstep(hooks, buckets)
        momenta = [
            torch.cat([hook.state[name]["momentum"].flatten() for name in SHAPES]).double()
            for hook in hooks
        ]
        new = torch.stack(momenta).mean(0)
        unit = max(torch.finfo(dtype).eps, 1e-6) * 8
        torch.testing.assert_close(results[0].double() + new, old / 2 + mean, rtol=unit, atol=unit)
        old = new


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("sign", [False, True])
def test_non_finite_numbers_do_not_change_the_momenta(sign, bad):
    hooks = [DeMo(density=0.01, tile=8, sign=sign) for _ in range(3)]
    lockstep(hooks, [make_bucket(gradients_of(rank, 0), 0) for rank in range(3)])
    before = [
        {name: entry["momentum"].clone() for name, entry in hook.state.items()} for hook in hooks
    ]
    gradients = [gradients_of(rank, 1) for rank in range(3)]
    gradients[2]["odd"][3, 4] = bad
    results, _ = lockstep(hooks, [make_bucket(named, 1) for named in gradients])
    assert all(result.isnan().all() for result in results)
    for hook, momenta in zip(hooks, before, strict=True):
        assert all(torch.equal(hook.state[name]["momentum"], m) for name, m in momenta.items())


def test_one_message_has_the_bytes_of_the_formula():
    bucket = make_bucket(gradients_of(0, 0))
    hook = DeMo(density=3 / 64, tile=8)
    _, (comm,) = lockstep([hook], [bucket])
    count = NUMEL // 64 * 3 + min(3, NUMEL % 64)
    assert [tensor.nbytes for tensor in comm.sent] == [gather_bytes(bucket, count, 2)]
    assert hook.wire_bytes(bucket, 9) == gather_bytes(bucket, count, 9)
