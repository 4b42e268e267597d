"""CPU kernels on one thread against a plain copy of the same gradients, in turn, round by round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import E3M0, E4M3, E5M2, MXFP4, NATURAL, NVFP4, integers, signs

NUMEL = 38_000_000  # 152 MB
ROUNDS = 7
WARM_UP = 2

# The codecs of the hooks' defaults, and the aim as a share of the bandwidth of a copy.
CODECS: dict[str, tuple[BlockCodec, str]] = {
    "int8": (BlockCodec(integers(8), 256), "0.5"),
    "int8, stochastic": (BlockCodec(integers(8, stochastic=True), 256), "any"),
    "int4": (BlockCodec(integers(4), 128), "0.5"),
    "int4, rotated": (BlockCodec(integers(4), 128, rotated=True), "any"),
    "int2": (BlockCodec(integers(2, norm="signed_max"), 64), "0.5"),
    "fp8 e4m3": (BlockCodec(E4M3, 256), "0.5"),
    "fp8 e5m2": (BlockCodec(E5M2, 256), "0.5"),
    "fp4 mxfp4": (BlockCodec(MXFP4, 1024), "0.5"),
    "fp4 nvfp4": (BlockCodec(NVFP4, 1024), "0.5"),
    "fp4 e3m0": (BlockCodec(E3M0, 1024), "0.5"),
    "natural": (BlockCodec(NATURAL, 512), "0.5"),
    "qsgd": (BlockCodec(integers(4, stochastic=True), 128), "any"),
    "terngrad": (BlockCodec(integers(2, clip=2.5, stochastic=True), 512), "any"),
    "onebit": (BlockCodec(signs("root_mean"), 128), "0.6"),
    "signsgd": (BlockCodec(signs("mean"), 128), "0.6"),
}


@pytest.fixture(scope="module")
def gradients() -> Iterator[Tensor]:
    """Use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(threads)


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(
    benchmark: Any, run: Callable[[], Any], moved_bytes: int, source: Tensor, aim: str
) -> None:
    """Time ``run`` against a copy. ``moved_bytes``: what it reads and writes."""
    target = torch.empty_like(source)
    copy_seconds: list[float] = []
    run_seconds: list[float] = []
    benchmark.pedantic(
        lambda: run_seconds.append(seconds_of(run)),
        setup=lambda: copy_seconds.append(seconds_of(lambda: target.copy_(source))),
        rounds=ROUNDS,
        warmup_rounds=WARM_UP,
        iterations=1,
    )
    rounds = list(zip(copy_seconds, run_seconds, strict=True))[WARM_UP:]
    seconds = statistics.median(run for _, run in rounds)
    shares = [copy / run * moved_bytes / (2 * source.nbytes) for copy, run in rounds]
    benchmark.extra_info.update(
        milliseconds=1e3 * seconds,
        moved_bytes=moved_bytes,
        bandwidth=moved_bytes / seconds,
        share_of_copy=statistics.median(shares),
        aim=f"share_of_copy {aim}",
    )


@pytest.mark.benchmark(group="kernels: encode")
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "with feedback"])
@pytest.mark.parametrize("name", CODECS)
def test_encode(benchmark: Any, gradients: Tensor, name: str, feedback: bool) -> None:
    """Encode. With feedback, the same pass reads an error and writes the residual."""
    codec, aim = CODECS[name]
    values = gradients.clone()
    error = 0.1 * gradients if feedback else None
    message = torch.empty(1, codec.encoded_bytes(NUMEL), dtype=torch.uint8)
    codec.encode(values, message, NUMEL, error=error, seed=1, keep_residual=True)
    wanted = gradients if error is None else gradients + error
    torch.testing.assert_close(values + decoded(codec, message), wanted)
    values.copy_(gradients)
    measure(
        benchmark,
        lambda: codec.encode(values, message, NUMEL, error=error, seed=1, keep_residual=feedback),
        (3 if feedback else 1) * values.nbytes + message.nbytes,
        gradients,
        aim,
    )


@pytest.mark.benchmark(group="kernels: decode and average")
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", CODECS)
def test_decode(benchmark: Any, gradients: Tensor, name: str, count: int) -> None:
    """Decode and average the messages of ``count`` ranks."""
    codec, _ = CODECS[name]
    messages = torch.empty(count, codec.encoded_bytes(NUMEL), dtype=torch.uint8)
    for rank in range(count):
        codec.encode(gradients * (rank + 1), messages[rank : rank + 1], NUMEL, seed=rank)
    expected = sum(decoded(codec, message[None]) for message in messages) / count
    torch.testing.assert_close(decoded(codec, messages), expected)
    average = torch.empty_like(gradients)
    measure(
        benchmark,
        lambda: codec.average(messages, average, NUMEL),
        average.nbytes + messages.nbytes,
        gradients,
        "0.5",
    )


def decoded(codec: BlockCodec, messages: Tensor) -> Tensor:
    values = torch.empty(NUMEL)
    codec.average(messages, values, NUMEL)
    return values
