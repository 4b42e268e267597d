"""Launches of sparse.cu: what sparse hooks send and keep.

Indices are int32 and ascending; values are float32 or float64. Nothing here synchronizes.
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
    "Code",
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


@dataclass(frozen=True)
class Code:
    """How indices are written, see Note [Index code]; ``nbytes``: in how many bytes."""

    high_bits: int
    low_bits: int
    adds_rank: bool
    nbytes: int


def pack(indices: Tensor, values: Tensor | None, code: Code, out: Tensor) -> None:
    """Writes indices, and behind them values, into ``out``: uint8, zeros, aligned to 8 bytes."""
    count = indices.numel()
    high_words, low_words = _words(code.high_bits), _words(count * code.low_bits)
    arguments = (
        indices,
        values,
        count,
        code.low_bits,
        code.adds_rank,
        high_words,
        low_words,
        code.nbytes,
        out,
    )
    kernel = _OF_VALUES[torch.float32 if values is None else values.dtype]["pack"]
    _launch(kernel, arguments, max(count, low_words))


@dataclass(frozen=True)
class Received:
    """The parts of all ranks. ``indices``: (ranks, capacity), filled as far as they go.

    ``starts``: for each rank and segment of the result, its first index there. ``verdict``: ()
    bool, whether all are sound: indices ascend, and values are finite.
    """

    messages: Tensor
    values_at: int
    indices: Tensor
    starts: Tensor
    verdict: Tensor


def receive(
    messages: Tensor, code: Code, capacity: int, dtype: torch.dtype, numel: int
) -> Received:
    """Reads the indices of ``messages``, (ranks, bytes) uint8; values of ``dtype`` follow them.

    ``capacity``: of each, with zeros behind.
    """
    ranks, pitch = messages.shape
    high_words = _words(code.high_bits)
    tiles = _blocks(high_words)
    segments = _blocks(numel, _SEGMENT)
    words = messages.new_zeros(ranks * tiles + ranks + 1, dtype=torch.int64)
    indices = messages.new_empty((ranks, capacity), dtype=torch.int32)
    starts = messages.new_empty((ranks, segments + 1), dtype=torch.int32)
    verdict = messages.new_empty((), dtype=torch.bool)
    bitmap = (messages, pitch)
    grid = (tiles, ranks, 1)
    arguments: tuple[Argument, ...] = (*bitmap, high_words, capacity, words, verdict)
    launch(SOURCE, _COMMON["count_indices"], arguments, grid=grid, block=_THREADS)
    arguments = (*bitmap, code.low_bits, code.adds_rank, high_words, words, capacity, indices)
    launch(SOURCE, _COMMON["unpack"], arguments, grid=grid, block=_THREADS)
    arguments = (*bitmap, code.nbytes, indices, capacity, words, tiles)
    grid = (_blocks(capacity), ranks, 1)
    arguments = (*arguments, numel, segments, starts, verdict)
    launch(SOURCE, _OF_VALUES[dtype]["check"], arguments, grid=grid, block=_THREADS)
    return Received(messages, code.nbytes, indices, starts, verdict)


def store_mean(
    received: Received,
    mean: Tensor,
    *,
    own_rank: int = 0,
    total: Tensor | None = None,
    error: Tensor | None = None,
) -> None:
    """``mean`` becomes that of the parts, added by rank; NaN if they are not sound.

    If they are, ``error`` becomes ``total``, which may be the mean's memory, less the own part.
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
        received.verdict,
        own_rank,
        total,
        error,
        mean,
    )
    blocks = _blocks(mean.numel(), _SEGMENT)
    launch(SOURCE, _OF_VALUES[mean.dtype]["store_mean"], arguments, grid=blocks, block=_THREADS)


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """``out[indices] += values``, for different indices. Those out of range are left out."""
    count = indices.numel()
    arguments = (values, indices, count, out.numel(), out)
    kernel = _OF_NUMBERS[out.dtype]["scatter_add"]
    launch(SOURCE, kernel, arguments, grid=_blocks(count), block=_THREADS)


def draw_indices(seed: int, rotation: int, numel: int, out: Tensor) -> None:
    """Fills ``out`` with different indices below ``numel``, the same as on a CPU."""
    _launch(_COMMON["draw"], (seed, rotation, numel, out.numel(), out), out.numel())


def correct_momentum(gradient: Tensor, velocity: Tensor, error: Tensor, momentum: float) -> Tensor:
    """``gradient`` becomes momentum · velocity + gradient; returned is that plus ``error``."""
    check_gradient(gradient, velocity, error)
    total = torch.empty_like(gradient)
    numel = gradient.numel()
    blocks = min(_STREAMING_BLOCKS, _blocks(numel, 4 * _THREADS))
    arguments = (gradient, velocity, error, float(momentum), numel, total)
    kernel = _OF_NUMBERS[gradient.dtype]["correct_momentum"]
    launch(SOURCE, kernel, arguments, grid=blocks, block=_THREADS)
    return total


def _launch(kernel: str, arguments: tuple[Argument, ...], threads: int) -> None:
    launch(SOURCE, kernel, arguments, grid=_blocks(threads), block=_THREADS)


def _blocks(threads: int, of: int = _THREADS) -> int:
    return -(-threads // of)


def _words(bits: int) -> int:
    return -(-bits // 64)
