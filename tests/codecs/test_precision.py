"""The dtypes of sums, and casts to half precision."""

import pytest
import torch

from commhooks.precision import at_least_float32, saturating_cast, scaled_cast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("headroom", [1, 2])
def test_finite_numbers_are_clamped_and_others_stay(dtype, headroom):
    largest = torch.finfo(dtype).max / headroom
    beyond = torch.finfo(torch.float32).max
    values = torch.tensor([0.5, beyond, -beyond, torch.inf, -torch.inf, torch.nan])
    expected = torch.tensor([0.5, largest, -largest, torch.inf, -torch.inf, torch.nan])
    found = saturating_cast(values, dtype, headroom)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_and_float64_are_not_clamped(dtype):
    values = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    assert torch.equal(saturating_cast(values, dtype, headroom=2), values.to(dtype))


def test_the_dtype_of_sums():
    wide = [at_least_float32(d) for d in (torch.float16, torch.bfloat16, torch.float64)]
    assert wide == [torch.float32, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3])
def test_scaled_cast_rounds_as_two_operations_of_torch_do(
    dtype: torch.dtype, wide: torch.dtype, size: int
) -> None:
    values = torch.randn(10_001, dtype=wide, generator=torch.Generator().manual_seed(1))
    values[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    for given in (values, values[::2], torch._neg_view(values)):
        before = given.clone()
        found = scaled_cast(given, 1 / size, torch.empty_like(given, dtype=dtype))
        assert found.dtype == dtype
        assert torch.equal(found.nan_to_num(7), (given * (1 / size)).to(dtype).nan_to_num(7))
        assert torch.equal(given.nan_to_num(7), before.nan_to_num(7))
