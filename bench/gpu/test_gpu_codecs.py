"""Encoding and decoding of 256 MB against a plain copy of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu.device_time import against_copy
from bench.test_kernels import CODECS

NUMEL = 1 << 26  # 256 MiB of fp32
AIM = "share_of_copy at least 0.8"


@pytest.fixture(scope="module")
def gradients() -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(NUMEL, device="cuda", generator=torch.Generator("cuda").manual_seed(0))


@pytest.mark.benchmark(group="gpu: encode 256 MB")
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "with feedback"])
@pytest.mark.parametrize("name", CODECS)
def test_encode(benchmark: Any, gradients: Tensor, name: str, feedback: bool) -> None:
    """Encode. With feedback, the same pass reads an error and writes the residual."""
    codec, _ = CODECS[name]
    values = gradients.clone()
    error = 0.1 * gradients if feedback else None
    message = torch.empty(1, codec.encoded_bytes(NUMEL), dtype=torch.uint8, device="cuda")
    codec.encode(values, message, NUMEL, error=error, seed=1, keep_residual=True)
    wanted = gradients if error is None else gradients + error
    decoded = torch.empty_like(gradients)
    codec.average(message, decoded, NUMEL)
    torch.testing.assert_close(values + decoded, wanted)
    values.copy_(gradients)
    against_copy(
        benchmark,
        lambda: codec.encode(values, message, NUMEL, error=error, seed=1, keep_residual=feedback),
        (3 if feedback else 1) * values.nbytes + message.nbytes,
        gradients,
        AIM,
    )


@pytest.mark.benchmark(group="gpu: decode and average 256 MB")
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", CODECS)
def test_decode(benchmark: Any, gradients: Tensor, name: str, count: int) -> None:
    """Decode and average the messages of ``count`` ranks, in one launch."""
    codec, _ = CODECS[name]
    shape = (count, codec.encoded_bytes(NUMEL))
    messages = torch.empty(shape, dtype=torch.uint8, device="cuda")
    one = torch.empty_like(gradients)
    expected = torch.zeros_like(gradients)
    for rank in range(count):
        message = messages[rank : rank + 1]
        codec.encode(gradients * (rank + 1), message, NUMEL, seed=rank)
        codec.average(message, one, NUMEL)
        expected += one / count
    codec.average(messages, one, NUMEL)
    torch.testing.assert_close(one, expected)
    moved_bytes = one.nbytes + messages.nbytes
    against_copy(
        benchmark, lambda: codec.average(messages, one, NUMEL), moved_bytes, gradients, AIM
    )
