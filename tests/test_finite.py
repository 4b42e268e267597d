"""Whether all numbers are finite."""

import pytest
import torch

from commhooks.algorithms.finite import all_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("length", [1, 7, 1025])
def test_finds_a_number_anywhere(dtype: torch.dtype, number: float, length: int) -> None:
    for place in {0, length // 2, length - 1}:
        tensor = torch.randn(length).to(dtype)
        assert all_finite(tensor)
        tensor[place] = number
        assert not all_finite(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    assert all_finite(torch.tensor([info.max, info.min, info.tiny, -0.0] * 50, dtype=dtype))
    assert all_finite(torch.empty(0, dtype=dtype))
