"""Launches of sparse.cu: write, read and add the elements that sparse hooks send.

Indices are int32 and ascending; values are float32 or float64, and in messages also in half
precision. ``high_bits``, ``low_bits`` and ``adds_rank`` describe how indices are written: Note
[Index code] in codecs/index_code.py. Nothing here synchronizes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.kernels.elements import ELEMENTS, TYPES
from commhooks.kernels.launcher import Argument, launch
from commhooks.kernels.selection import check_gradient
from commhooks.kernels.source import Source
from commhooks.precision import at_least_float32

__all__ = [
    "SOURCE",
    "Received",
    "correct_momentum",
    "draw_indices",
    "pack",
    "receive",
    "scatter_add",
    "store_mean",
]

_COMMON = {name: f"commhooks::kernels::{name}" for name in ("count_indices", "unpack", "draw")}
_OF_NUMBERS = {
    dtype: {
        name: f"commhooks::kernels::{name}<{type_}>" for name in ("scatter_add", "correct_momentum")
    }
    for dtype, type_ in TYPES.items()
}
_OF_VALUES = {
    dtype: {
        "pack": f"commhooks::kernels::pack<{element}>",
        "check": f"commhooks::kernels::check<{element}>",
        "store_mean": f"commhooks::kernels::store_mean<{computes_in}, {element}>",
    }
    for dtype, element in ELEMENTS.items()
    for computes_in in [TYPES[at_least_float32(dtype)]]
}
SOURCE = Source(
    "sparse.cu",
    tuple(
        name
        for names in (_COMMON, *_OF_NUMBERS.values(), *_OF_VALUES.values())
        for name in names.values()
    ),
)

_THREADS = 256
_SEGMENT = 4096
_STREAMING_BLOCKS = 2048


def pack(
    indices: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    high_bits: int,
    low_bits: int,
    adds_rank: bool,
    values_at: int,
) -> None:
    """Write indices, and values from byte ``values_at`` on, into ``out``.

    ``out`` is uint8, holds zeros and is aligned to 8 bytes.
    """
    count = indices.numel()
    high_words, low_words = _words(high_bits), _words(count * low_bits)
    arguments = (
        indices,
        values,
        count,
        low_bits,
        adds_rank,
        high_words,
        low_words,
        values_at,
        out,
    )
    _launch(_OF_VALUES[values.dtype]["pack"], arguments, _blocks(max(count, low_words)))


@dataclass(frozen=True)
class Received:
    """The messages of all ranks, and what has been read from them."""

    messages: Tensor
    """(ranks, bytes) uint8."""
    values_at: int
    """The byte of each message where the values begin."""
    indices: Tensor
    """(ranks, capacity); only the first indices of each row, as many as the rank sent, are set."""
    starts: Tensor
    """(ranks, segments + 1): the position of the first index of each rank in each segment of the
    result."""
    all_finite: Tensor
    """() bool: whether all values are finite and all messages intact, with ascending indices."""


def receive(
    messages: Tensor,
    dtype: torch.dtype,
    *,
    numel: int,
    capacity: int,
    high_bits: int,
    low_bits: int,
    adds_rank: bool,
    values_at: int,
) -> Received:
    """Read the indices of ``messages``, (ranks, bytes) uint8, and check indices and values.

    Each message holds up to ``capacity`` values of ``dtype``, at least 1, and zeros behind them.
    """
    ranks, pitch = messages.shape
    high_words = _words(high_bits)
    tiles = _blocks(high_words)
    segments = _blocks(numel, _SEGMENT)
    words = messages.new_zeros(ranks * tiles + ranks + 1, dtype=torch.int64)
    indices = messages.new_empty((ranks, capacity), dtype=torch.int32)
    starts = messages.new_empty((ranks, segments + 1), dtype=torch.int32)
    all_finite = messages.new_empty((), dtype=torch.bool)
    bitmap = (messages, pitch)
    grid = (tiles, ranks, 1)
    arguments: tuple[Argument, ...] = (*bitmap, high_words, capacity, words, all_finite)
    _launch(_COMMON["count_indices"], arguments, grid)
    arguments = (*bitmap, low_bits, adds_rank, high_words, words, capacity, indices)
    _launch(_COMMON["unpack"], arguments, grid)
    arguments = (*bitmap, values_at, indices, capacity, words, tiles)
    arguments = (*arguments, numel, segments, starts, all_finite)
    _launch(_OF_VALUES[dtype]["check"], arguments, (_blocks(capacity), ranks, 1))
    return Received(messages, values_at, indices, starts, all_finite)


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
        received.values_at,
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
    _launch(_OF_VALUES[mean.dtype]["store_mean"], arguments, _blocks(mean.numel(), _SEGMENT))


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Add ``values`` to ``out[indices]``. Indices differ; those out of range are ignored."""
    count = indices.numel()
    arguments = (values, indices, count, out.numel(), out)
    _launch(_OF_NUMBERS[out.dtype]["scatter_add"], arguments, _blocks(count))


def draw_indices(seed: int, rotation: int, numel: int, out: Tensor) -> None:
    """Fill ``out`` with different indices below ``numel``, the same as on a CPU."""
    count = out.numel()
    _launch(_COMMON["draw"], (seed, rotation, numel, count, out), _blocks(count))


def correct_momentum(gradient: Tensor, velocity: Tensor, error: Tensor, momentum: float) -> Tensor:
    """Add ``momentum * velocity`` to ``gradient`` in place; return that plus ``error``."""
    check_gradient(gradient, velocity, error)
    total = torch.empty_like(gradient)
    numel = gradient.numel()
    blocks = min(_STREAMING_BLOCKS, _blocks(numel, 4 * _THREADS))
    arguments = (gradient, velocity, error, float(momentum), numel, total)
    _launch(_OF_NUMBERS[gradient.dtype]["correct_momentum"], arguments, blocks)
    return total


def _launch(kernel: str, arguments: tuple[Argument, ...], grid: int | tuple[int, int, int]) -> None:
    launch(SOURCE, kernel, arguments, grid=grid, block=_THREADS)


def _blocks(elements: int, per_block: int = _THREADS) -> int:
    return -(-elements // per_block)


def _words(bits: int) -> int:
    return -(-bits // 64)
