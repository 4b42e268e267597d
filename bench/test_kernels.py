"""Codecs against a plain copy of the same gradients; on CPUs on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.copies import against_copy
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.fp4 import Fp4Codec
from commhooks.codecs.fp8 import Fp8Codec
from commhooks.codecs.levels import LevelCodec
from commhooks.codecs.natural import NaturalCodec
from commhooks.codecs.rotated import RotatedCodec
from commhooks.codecs.sign import SignCodec

NUMEL = 38_000_000  # 152 MB

GPU_AIM = "0.8"
# The codecs of the hooks' defaults, and the aim on CPUs as a share of the bandwidth of a copy.
CODECS: dict[str, tuple[BlockCodec, str]] = {
    "int8": (LevelCodec(8, block_size=256), "0.5"),
    "int8, stochastic": (LevelCodec(8, stochastic=True, block_size=256), "any"),
    "int4": (LevelCodec(4, block_size=128), "0.5"),
    "int4, rotated": (RotatedCodec(LevelCodec(4, block_size=128)), "any"),
    "int2": (LevelCodec(2, norm="signed_max", block_size=64), "0.5"),
    "fp8 e4m3": (Fp8Codec("e4m3", block_size=256), "0.5"),
    "fp8 e5m2": (Fp8Codec("e5m2", block_size=256), "0.5"),
    "fp4 mxfp4": (Fp4Codec("mxfp4"), "0.5"),
    "fp4 nvfp4": (Fp4Codec("nvfp4"), "0.5"),
    "fp4 e3m0": (Fp4Codec("e3m0"), "0.5"),
    "natural": (NaturalCodec(block_size=512), "0.5"),
    "qsgd": (LevelCodec(4, stochastic=True, block_size=128), "any"),
    "terngrad": (LevelCodec(2, clip=2.5, stochastic=True, block_size=512), "any"),
    "onebit": (SignCodec("root_mean", block_size=128), "0.6"),
    "signsgd": (SignCodec("mean", block_size=128), "0.6"),
}


@pytest.fixture(scope="module")
def gradients() -> Iterator[Tensor]:
    """Use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(threads)


@pytest.mark.benchmark(group="kernels: encode")
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "with feedback"])
@pytest.mark.parametrize("name", CODECS)
def test_encode(benchmark: Any, gradients: Tensor, name: str, feedback: bool) -> None:
    """Encode. With feedback, the same pass reads an error and writes the residual."""
    codec, aim = CODECS[name]
    values, numel = gradients.clone(), gradients.numel()
    error = 0.1 * gradients if feedback else None
    message = messages_of(codec, gradients, 1)
    codec.encode(values, message, numel, error=error, seed=1, keep_residual=True)
    wanted = gradients if error is None else gradients + error
    torch.testing.assert_close(values + decoded(codec, message, gradients), wanted)
    values.copy_(gradients)
    against_copy(
        benchmark,
        lambda: codec.encode(values, message, numel, error=error, seed=1, keep_residual=feedback),
        (3 if feedback else 1) * values.nbytes + message.nbytes,
        gradients,
        f"share_of_copy {GPU_AIM if gradients.is_cuda else aim}",
    )


@pytest.mark.benchmark(group="kernels: decode and average")
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", CODECS)
def test_decode(benchmark: Any, gradients: Tensor, name: str, count: int) -> None:
    """Decode and average the messages of ``count`` ranks."""
    codec, _ = CODECS[name]
    messages, numel = messages_of(codec, gradients, count), gradients.numel()
    expected = torch.zeros_like(gradients)
    for rank in range(count):
        message = messages[rank : rank + 1]
        codec.encode(gradients * (rank + 1), message, numel, seed=rank)
        expected += decoded(codec, message, gradients) / count
    average = decoded(codec, messages, gradients)
    torch.testing.assert_close(average, expected)
    against_copy(
        benchmark,
        lambda: codec.average(messages, average, numel),
        average.nbytes + messages.nbytes,
        gradients,
        f"share_of_copy {GPU_AIM if gradients.is_cuda else '0.5'}",
    )


def messages_of(codec: BlockCodec, like: Tensor, count: int) -> Tensor:
    shape = (count, codec.encoded_bytes(like.numel()))
    return torch.empty(shape, dtype=torch.uint8, device=like.device)


def decoded(codec: BlockCodec, messages: Tensor, like: Tensor) -> Tensor:
    values = torch.empty_like(like)
    codec.average(messages, values, like.numel())
    return values
