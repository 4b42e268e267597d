"""Stochastic rounding to bfloat16: neighbors, expected values, and one result for all ways."""

import pytest
import torch
from emulation import emulated
from torch import Tensor

from commhooks.codecs.rounding import round_stochastically
from commhooks.fallback import round_stochastically as in_torch

SIZES = (1, 7, 1000, 70_001)
_EXTREMES = [0.0, -0.0, 1e-40, -1e-40, 3.3895e38, 3.4e38, -3.4e38]
_NOT_FINITE = [float("inf"), -float("inf"), float("nan")]


def rounded(values: Tensor, seed: int = 5, scale: float = 1.0) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    return round_stochastically(values, scale, out, seed)


def numbers(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).exp().sub_(1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_kernel_loop_and_fallback_have_one_result(size: int, seed: int) -> None:
    values = numbers(size)
    found = rounded(values, seed, 1 / 3)
    expected = torch.empty_like(found)
    in_torch(values, 1 / 3, expected, seed)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    with emulated():
        assert torch.equal(found, rounded(values, seed, 1 / 3))


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
def test_numbers_become_one_of_their_neighbors(scale: float) -> None:
    values = numbers(10_000)
    product = values * scale
    below = (product.view(torch.int32) & -65536).view(torch.float32)
    above = ((product.view(torch.int32) & -65536) + 65536).view(torch.float32)
    found = rounded(values, scale=scale).float()
    assert ((found == below) | (found == above)).all()
    assert (found == below).any()
    assert (found == above).any()


def test_the_expected_value_is_the_number() -> None:
    values = numbers(64)
    rounds = 4000
    mean = torch.stack([rounded(values, seed).double() for seed in range(rounds)]).mean(0)
    step = ((values.view(torch.int32) & 0x7F800000).view(torch.float32) / 128).double()
    # A uniform position between neighbors deviates by at most half a step; six sigmas.
    assert ((mean - values).abs() <= 6 * 0.5 * step / rounds**0.5).all()
    nearest = (values.bfloat16().double() - values).abs()
    assert (nearest > 6 * 0.5 * step / rounds**0.5).any()


def test_representable_numbers_stay() -> None:
    values = numbers(1000).bfloat16()
    assert torch.equal(rounded(values.float()), values)


def test_the_largest_numbers_do_not_become_infinite() -> None:
    for seed in range(50):
        found = rounded(torch.tensor(_EXTREMES), seed)
        assert found.isfinite().all()
        assert torch.equal(found.signbit(), torch.tensor(_EXTREMES).signbit())
        lost = rounded(torch.tensor(_NOT_FINITE), seed)
        assert torch.equal(lost[:2].float(), torch.tensor(_NOT_FINITE[:2]))
        assert lost[2].isnan()


def test_a_nan_with_low_bits_stays_one() -> None:
    strange = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert rounded(strange).isnan().all()
    out = torch.empty(2, dtype=torch.bfloat16)
    in_torch(strange, 1.0, out, 0)
    assert out.isnan().all()


def test_nothing_and_other_dtypes() -> None:
    assert rounded(torch.empty(0)).numel() == 0
    values = numbers(100).double()
    assert torch.equal(rounded(values), rounded(values.float()))
