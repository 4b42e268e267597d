"""Codecs and the selection of top-k against a plain copy of the gradients, on one thread."""

from collections.abc import Iterator
from functools import partial
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from bench.copies import against_copy
from commhooks import algorithms
from commhooks.algorithms.quantized.base import Quantized
from commhooks.algorithms.sparse.selection import select_largest
from commhooks.codecs.block import BlockCodec

NUMEL = 38_000_000  # 152 MB

GPU_AIM = "0.8"
_AIMS = {"int8, stochastic": "any", "int4, rotated": "any", "qsgd": "any", "terngrad": "any",
         "onebit": "0.6", "signsgd": "0.6"}  # fmt: skip


def codecs_of_hooks() -> Iterator[tuple[str, BlockCodec]]:
    """Yield the codecs of the hooks' defaults, and of all formats that they offer."""
    for kind in (getattr(algorithms, name) for name in algorithms.__all__):
        if issubclass(kind, Quantized):
            formats = get_args(get_type_hints(kind).get("format"))
            for number_format in formats:
                yield f"{kind.name} {number_format}", kind(format=number_format).make_codec()
            if not formats:
                yield kind.name, kind().make_codec()
    yield "int8, stochastic", algorithms.Int8(stochastic=True).make_codec()
    yield "int4, rotated", algorithms.Int4(rotate=True).make_codec()


# With the aim on CPUs as a share of the bandwidth of a copy.
CODECS = {name: (codec, _AIMS.get(name, "0.5")) for name, codec in codecs_of_hooks()}


@pytest.fixture(scope="module")
def gradients(one_thread: None) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


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
    sent = decoded(codec, message, gradients)
    assert sent.count_nonzero() > 0
    torch.testing.assert_close(values + sent, wanted)
    values.copy_(gradients)
    against_copy(
        benchmark,
        lambda: codec.encode(values, message, numel, error=error, seed=1, keep_residual=feedback),
        (3 if feedback else 1) * values.nbytes + message.nbytes,
        gradients,
        aim=f"share_of_copy {GPU_AIM if gradients.is_cuda else aim}",
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
        aim=f"share_of_copy {GPU_AIM if gradients.is_cuda else '0.5'}",
    )


def messages_of(codec: BlockCodec, like: Tensor, count: int) -> Tensor:
    shape = (count, codec.encoded_bytes(like.numel()))
    return torch.empty(shape, dtype=torch.uint8, device=like.device)


def decoded(codec: BlockCodec, messages: Tensor, like: Tensor) -> Tensor:
    values = torch.empty_like(like)
    codec.average(messages, values, like.numel())
    return values


@pytest.mark.benchmark(group="kernels: select the largest 1 %")
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "with feedback"])
def test_selection(benchmark: Any, gradients: Tensor, feedback: bool) -> None:
    """Select. With feedback, the same pass adds the error."""
    count = gradients.numel() // 100
    total = gradients.clone()
    errors = 0.1 * gradients if feedback else None
    expected = 1.1 * gradients if feedback else gradients
    indices = select_largest(total, errors, count)
    torch.testing.assert_close(total, expected)
    largest = total.abs().topk(count, sorted=False).values.sort().values
    assert torch.equal(total[indices.long()].abs().sort().values, largest)
    nothing = torch.zeros_like(total) if feedback else None  # so that all rounds are equal
    moved_bytes = total.nbytes * (3 if feedback else 1)
    run = partial(select_largest, total, nothing, count)
    aim = "share_of_copy 0.33" if gradients.is_cuda else "40 ms"
    against_copy(benchmark, run, moved_bytes, gradients, aim=aim)
