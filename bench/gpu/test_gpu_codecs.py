"""Codecs and the selection of top-k on 256 MB: the benchmarks of CPUs, on the device."""

import pytest
import torch
from torch import Tensor

from bench.test_kernels import test_decode, test_encode, test_selection

__all__ = ["gradients", "test_decode", "test_encode", "test_selection"]


@pytest.fixture(scope="module")
def gradients() -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(1 << 26, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
