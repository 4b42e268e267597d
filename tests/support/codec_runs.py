"""Run all methods of a codec on numbers of every kind, at any offset in memory."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import FORMATS, Format, integers, signs


def _plain(number_format: Format) -> Callable[[int], BlockCodec]:
    multiple = 128 if number_format.group else 1
    return lambda block: BlockCodec(number_format, -(-block // multiple) * multiple)


CODECS: dict[str, Callable[[int], BlockCodec]] = {
    **{name: _plain(number_format) for name, number_format in FORMATS.items()},
    "int8": lambda block: BlockCodec(integers(8), block),
    "int8 stochastic": lambda block: BlockCodec(integers(8, stochastic=True), block),
    "int4": lambda block: BlockCodec(integers(4), block),
    "4 levels, l2": lambda block: BlockCodec(integers(4, 4, norm="l2", stochastic=True), block),
    "int2": lambda block: BlockCodec(integers(2, norm="signed_max"), block),
    "2 bits": lambda block: BlockCodec(integers(2), block),
    "ternary, clipped": lambda block: BlockCodec(integers(2, 1, clip=2.5, stochastic=True), block),
    "sign, mean": lambda block: BlockCodec(signs("mean"), block),
    "sign, root mean": lambda block: BlockCodec(signs("root_mean"), block),
    "int4, rotated": lambda block: BlockCodec(integers(4), block, rotated=True),
    "int2, rotated": lambda block: BlockCodec(integers(2, norm="signed_max"), block, rotated=True),
    "majority": lambda block: BlockCodec(signs("mean", majority=True), block),
}


def numbers(numel: int, kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind == "any size":
        values *= torch.exp2(torch.randint(-140, 125, (numel,), generator=generator).double())
    elif kind == "tiny":
        values *= torch.exp2(torch.randint(-149, -90, (numel,), generator=generator).double())
    elif kind == "zeros":
        values[values.abs() < 0.9] *= 0
        values[: numel // 2] *= -0.0
    elif kind == "not finite":
        values[numel // 3 :: 97] = math.inf
        values[numel // 2 :: 131] = math.nan
    return values.to(dtype)


def shifted(values: Tensor, offset: int, device: str) -> Tensor:
    """Return a copy that begins ``offset`` numbers after an aligned address, padded with sevens."""
    memory = torch.full((values.numel() + offset + 8,), 7, dtype=values.dtype, device=device)
    copy = memory[offset : offset + values.numel()]
    copy.copy_(values)
    return copy


def around(copy: Tensor) -> Tensor:
    """Return the padding of such a copy."""
    start = copy.storage_offset()
    memory = copy.as_strided((start + copy.numel() + 8,), (1,), 0)
    return torch.cat([memory[:start], memory[start + copy.numel() :]])


def run(
    codec: BlockCodec, given: Tensor, error: Tensor | None, parts: int, offset: int, device: str
) -> Iterator[Tensor]:
    """Yield all results of a codec for these numbers: messages, residuals and decoded numbers."""
    length = -(-given.numel() // parts)
    values = shifted(given, offset, device)
    added = None if error is None else shifted(error, 3 * offset, device)
    messages = torch.full((parts, codec.encoded_bytes(length)), 0xAA, dtype=torch.uint8).to(device)
    codec.encode(values, messages, length, error=added, seed=2**63 + 5)
    yield messages.clone()
    yield values.clone()
    codec.encode(values, messages, length, error=added, seed=7, keep_residual=True)
    yield messages.clone()
    yield values.clone()
    yield around(values)
    mean = shifted(torch.ones(max(0, length - 3)), offset, device)
    codec.average(messages, mean, length)
    yield mean
    yield around(mean)
    result = shifted(given, offset, device)
    kept = shifted(given * 0 + 3, 2 * offset, device)
    yield codec.assemble(messages, result, length, kept=kept)
    yield result
    yield kept
    yield torch.cat([around(result), around(kept)])
    codec.assemble(messages, result, length)
    yield result
