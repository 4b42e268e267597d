"""Fixtures of all benchmarks here."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    """Skip all benchmarks without a CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
