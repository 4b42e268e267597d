"""Benchmarks of CPUs, on the device: codecs and top-k on 256 MB, and the host time of hooks."""

import pytest
import torch
from torch import Tensor

from bench.test_host_time import test_host_time, test_replay
from bench.test_kernels import test_decode, test_encode, test_selection

__all__ = [
    "gradients",
    "test_decode",
    "test_encode",
    "test_host_time",
    "test_replay",
    "test_selection",
]


@pytest.fixture(scope="module")
def gradients() -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(1 << 26, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
