"""Launches of sparse.cu: what sparse hooks send and keep.

Indices are int32 and ascending; values are float32 or float64. Nothing here synchronises.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.kernels.launcher import Argument, launch
from commhooks.kernels.selection import TYPES, check_gradient
from commhooks.kernels.source import Source

__all__ = [
    "SOURCE",
    "Received",
    "correct_momentum",
    "draw_indices",
    "pack_indices",
    "receive",
    "scatter_add",
    "store_mean",
]

SOURCE = Source(
    "sparse.cu",
    (
        *(f"commhooks::kernels::{name}" for name in ("pack", "count_indices", "unpack", "draw")),
        *(
            f"commhooks::kernels::{name}<{type_}>"
            for name in ("check", "store_mean", "scatter_add", "correct_momentum")
            for type_ in TYPES.values()
        ),
    ),
)

_THREADS = 256
_SEGMENT = 4096
_STREAMING_BLOCKS = 2048


def pack_indices(
    indices: Tensor, high_bits: int, low_bits: int, adds_rank: bool, out: Tensor
) -> None:
    """Writes indices into ``out``: uint8, zeros, aligned to 8 bytes. See Note [Index code]."""
    count = indices.numel()
    high_words, low_words = _words(high_bits), _words(count * low_bits)
    arguments = (indices, count, low_bits, adds_rank, high_words, low_words, out)
    _launch("pack", arguments, max(count, low_words))


@dataclass(frozen=True)
class Received:
    """The parts of all ranks. ``values``, ``indices``: (ranks, capacity), filled as far as they go.

    ``starts``: for each rank and segment of the result, its first index there. ``verdict``: ()
    bool, whether all are sound: indices ascend, and values are finite.
    """

    values: Tensor
    indices: Tensor
    starts: Tensor
    verdict: Tensor


def receive(
    messages: Tensor,
    values: Tensor,
    numel: int,
    high_bits: int,
    low_bits: int,
    adds_rank: bool,
) -> Received:
    """Reads the indices of ``messages``, (ranks, bytes) uint8, each of which begins with them.

    ``values``: (ranks, capacity), those that belong to them, zeros behind.
    """
    ranks, capacity = values.shape
    high_words = _words(high_bits)
    tiles = _blocks(high_words)
    segments = _blocks(numel, _SEGMENT)
    words = messages.new_zeros(ranks * tiles + ranks + 1, dtype=torch.int64)
    offsets, counts, ticket = torch.split(words, [ranks * tiles, ranks, 1])
    indices = messages.new_empty((ranks, capacity), dtype=torch.int32)
    starts = messages.new_empty((ranks, segments + 1), dtype=torch.int32)
    verdict = messages.new_empty((), dtype=torch.bool)
    bitmap = (messages, messages.stride(0))
    grid = (tiles, ranks, 1)
    arguments: tuple[Argument, ...] = (high_words, capacity, offsets, counts, ticket, verdict)
    launch(SOURCE, _name("count_indices"), (*bitmap, *arguments), grid=grid, block=_THREADS)
    arguments = (low_bits, adds_rank, high_words, offsets, capacity, indices)
    launch(SOURCE, _name("unpack"), (*bitmap, *arguments), grid=grid, block=_THREADS)
    arguments = (values, indices, capacity, counts, numel, segments, starts, verdict)
    grid = (_blocks(capacity), ranks, 1)
    launch(SOURCE, _name("check", values), arguments, grid=grid, block=_THREADS)
    return Received(values, indices, starts, verdict)


def store_mean(received: Received, mean: Tensor) -> None:
    """``mean`` becomes that of the parts, added by rank; NaN if they are not sound."""
    ranks, capacity = received.values.shape
    arguments = (
        received.values,
        received.indices,
        capacity,
        received.starts,
        ranks,
        mean.numel(),
        received.verdict,
        mean,
    )
    blocks = _blocks(mean.numel(), _SEGMENT)
    launch(SOURCE, _name("store_mean", mean), arguments, grid=blocks, block=_THREADS)


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """``out[indices] += values``, for different indices. Those out of range are left out."""
    count = indices.numel()
    arguments = (values, indices, count, out.numel(), out)
    launch(SOURCE, _name("scatter_add", out), arguments, grid=_blocks(count), block=_THREADS)


def draw_indices(seed: int, rotation: int, numel: int, out: Tensor) -> None:
    """Fills ``out`` with different indices below ``numel``, the same as on a CPU."""
    _launch("draw", (seed, rotation, numel, out.numel(), out), out.numel())


def correct_momentum(gradient: Tensor, velocity: Tensor, error: Tensor, momentum: float) -> Tensor:
    """``gradient`` becomes momentum · velocity + gradient; returned is that plus ``error``."""
    check_gradient(gradient, velocity, error)
    total = torch.empty_like(gradient)
    numel = gradient.numel()
    blocks = min(_STREAMING_BLOCKS, _blocks(numel, 4 * _THREADS))
    arguments = (gradient, velocity, error, float(momentum), numel, total)
    launch(SOURCE, _name("correct_momentum", gradient), arguments, grid=blocks, block=_THREADS)
    return total


def _launch(name: str, arguments: tuple[Argument, ...], threads: int) -> None:
    launch(SOURCE, _name(name), arguments, grid=_blocks(threads), block=_THREADS)


def _name(kernel: str, values: Tensor | None = None) -> str:
    type_ = "" if values is None else f"<{TYPES[values.dtype]}>"
    return f"commhooks::kernels::{kernel}{type_}"


def _blocks(threads: int, of: int = _THREADS) -> int:
    return -(-threads // of)


def _words(bits: int) -> int:
    return -(-bits // 64)
