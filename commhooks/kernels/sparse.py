"""Launches of sparse.cu: write, read and add the elements that sparse hooks send.

Indices are int32 and ascending; values are float32 or float64, and in messages also in half
precision, behind the indices. Nothing here synchronizes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from commhooks.kernels.launcher import Argument, blocks_for, launch, streaming_blocks
from commhooks.kernels.source import ELEMENTS, TYPES, Source, kernel_name
from commhooks.precision import at_least_float32

_OF_NUMBERS = ("scatter_add", "correct_momentum")
SOURCE = Source(
    "sparse.cu",
    (
        *(kernel_name(name) for name in ("count_indices", "unpack", "draw")),
        *(kernel_name(name, type_) for type_ in TYPES.values() for name in _OF_NUMBERS),
        *(kernel_name(name, value) for value in ELEMENTS.values() for name in ("pack", "check")),
        *(
            kernel_name("store_mean", TYPES[at_least_float32(dtype)], value)
            for dtype, value in ELEMENTS.items()
        ),
    ),
)

_SEGMENT = 4096


class Code(Protocol):
    """How indices are written: codecs/index_code.py."""

    @property
    def numel(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def low_bits(self) -> int: ...
    @property
    def adds_rank(self) -> bool: ...
    @property
    def high_bits(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def pack(indices: Tensor, values: Tensor, out: Tensor, code: Code) -> None:
    """Write indices, and values behind them, into ``out``.

    ``out`` is uint8, holds zeros and is aligned to 8 bytes.
    """
    count = indices.numel()
    high_words, low_words = _words(code.high_bits), _words(count * code.low_bits)
    layout = (count, code.low_bits, code.adds_rank, high_words, low_words, code.nbytes)
    kernel = kernel_name("pack", ELEMENTS[values.dtype])
    arguments = (indices, values, *layout, out)
    launch(SOURCE, kernel, arguments, grid=blocks_for(max(count, low_words)))


@dataclass(frozen=True)
class Received:
    """The messages of all ranks, and what has been read from them."""

    messages: Tensor
    """(ranks, bytes) uint8."""
    code: Code
    indices: Tensor
    """(ranks, capacity); only the first indices of each row, as many as the rank sent, are set."""
    starts: Tensor
    """(ranks, segments + 1): the position of the first index of each rank in each segment of the
    result."""
    all_finite: Tensor
    """() bool: whether all values are finite and all messages intact, with ascending indices."""


def receive(messages: Tensor, dtype: torch.dtype, code: Code) -> Received:
    """Read the indices of ``messages``, (ranks, bytes) uint8, and check indices and values.

    Each message holds up to ``code.count`` values of ``dtype``, at least 1, and zeros behind them.
    """
    ranks, pitch = messages.shape
    capacity, high_words = code.count, _words(code.high_bits)
    tiles = blocks_for(high_words)
    segments = blocks_for(code.numel, _SEGMENT)
    words = messages.new_zeros(ranks * tiles + ranks + 1, dtype=torch.int64)
    indices = messages.new_empty((ranks, capacity), dtype=torch.int32)
    starts = messages.new_empty((ranks, segments + 1), dtype=torch.int32)
    all_finite = messages.new_empty((), dtype=torch.bool)
    bitmap = (messages, pitch)
    grid = (tiles, ranks, 1)
    arguments: tuple[Argument, ...] = (*bitmap, high_words, capacity, words, all_finite)
    launch(SOURCE, kernel_name("count_indices"), arguments, grid=grid)
    form = (code.low_bits, code.adds_rank, high_words)
    launch(SOURCE, kernel_name("unpack"), (*bitmap, *form, words, capacity, indices), grid=grid)
    arguments = (*bitmap, code.nbytes, indices, capacity, words, tiles)
    arguments = (*arguments, code.numel, segments, starts, all_finite)
    kernel = kernel_name("check", ELEMENTS[dtype])
    launch(SOURCE, kernel, arguments, grid=(blocks_for(capacity), ranks, 1))
    return Received(messages, code, indices, starts, all_finite)


def store_mean(
    received: Received, mean: Tensor, *, own_rank: int, total: Tensor, error: Tensor | None
) -> None:
    """Write the mean of the received vectors to ``mean``, added in the order of ranks.

    If ``received.all_finite``, ``error`` becomes ``total``, which may share the mean's memory,
    minus the vector of ``own_rank``. Otherwise the mean becomes NaN and ``error`` stays unchanged.
    """
    ranks, capacity = received.indices.shape
    arguments = (
        received.messages,
        received.messages.stride(0),
        received.code.nbytes,
        received.indices,
        capacity,
        received.starts,
        ranks,
        mean.numel(),
        received.all_finite,
        own_rank,
        total,
        error,
        mean,
    )
    types = TYPES[at_least_float32(mean.dtype)], ELEMENTS[mean.dtype]
    grid = blocks_for(mean.numel(), _SEGMENT)
    launch(SOURCE, kernel_name("store_mean", *types), arguments, grid=grid)


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Add ``values`` to ``out[indices]``. Indices differ; those out of range are ignored."""
    count = indices.numel()
    arguments = (values, indices, count, out.numel(), out)
    kernel = kernel_name("scatter_add", TYPES[out.dtype])
    launch(SOURCE, kernel, arguments, grid=blocks_for(count))


def draw_indices(seed: int, rotation: int, numel: int, out: Tensor) -> None:
    """Fill ``out`` with different indices below ``numel``, the same as on a CPU."""
    count = out.numel()
    arguments = (seed, rotation, numel, count, out)
    launch(SOURCE, kernel_name("draw"), arguments, grid=blocks_for(count))


def correct_momentum(gradient: Tensor, velocity: Tensor, error: Tensor, momentum: float) -> Tensor:
    """Add ``momentum * velocity`` to ``gradient`` in place; return that plus ``error``."""
    total = torch.empty_like(gradient)
    arguments = (gradient, velocity, error, float(momentum), gradient.numel(), total)
    kernel = kernel_name("correct_momentum", TYPES[gradient.dtype])
    launch(SOURCE, kernel, arguments, grid=streaming_blocks(gradient))
    return total


def _words(bits: int) -> int:
    return -(-bits // 64)
