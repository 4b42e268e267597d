"""Packs indices of sparse gradients, adds their values, draws some. See csrc/sparse/indices.h."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commhooks.pure.random import random_bits
from commhooks.pure.requirements import require, require_flat

__all__ = ["draw_indices", "pack_indices", "scatter_add", "unpack_indices"]

_WORD_BITS = 64

Integers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]


def pack_indices(
    indices: Tensor, high_bits: int, low_bits: int, adds_rank: bool, out: Tensor
) -> None:
    """Write ascending indices as a bitmap and low bits: Note [Index code] in codecs/index_code."""
    _check_packed(out, indices, high_bits, low_bits)
    numbers = indices.numpy().astype(np.int64)
    positions = numbers >> low_bits
    if adds_rank:
        positions += np.arange(numbers.size)
    require(
        numbers.size == 0 or (numbers[0] >= 0 and numbers[-1] >= 0 and positions[-1] < high_bits),
        f"Expected indices that fit {high_bits} bits, found {numbers[:1]} to {numbers[-1:]}.",
    )
    bitmap = np.zeros(_whole_words(high_bits), np.uint8)
    bitmap[positions] = 1
    fields = np.zeros(_whole_words(numbers.size * low_bits), np.uint8)
    low = (numbers[:, None] >> np.arange(low_bits)) & 1
    fields[: low.size] = low.ravel()
    packed = np.packbits(np.concatenate([bitmap, fields]), bitorder="little")
    out.numpy()[:] = packed


def unpack_indices(
    packed: Tensor, high_bits: int, low_bits: int, adds_rank: bool, numel: int, out: Tensor
) -> None:
    """Read what pack_indices wrote, and check it."""
    _check_packed(packed, out, high_bits, low_bits)
    count = out.numel()
    bits = np.unpackbits(packed.numpy(), bitorder="little")
    bitmap, fields = np.split(bits, [_whole_words(high_bits)])
    indices = np.flatnonzero(bitmap)
    is_complete = indices.size == count
    if is_complete:
        if adds_rank:
            indices -= np.arange(count)
        low = fields[: count * low_bits].reshape(count, low_bits).astype(np.int64)
        indices = indices << low_bits | (low << np.arange(low_bits)).sum(axis=1)
        out.numpy()[:] = indices.astype(np.int32)
    require(
        is_complete and _ascends(indices, numel),
        f"Expected {count} ascending indices below {numel} in a message: it is corrupted, or ranks "
        "have different options.",
    )


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Add values to out at ascending indices."""
    require_flat("values", values, out.dtype)
    require_flat("indices", indices, torch.int32)
    require_flat("out", out, out.dtype)
    require(
        values.numel() == indices.numel(),
        f"Expected as many values as indices, found {values.numel()} and {indices.numel()}.",
    )
    if indices.numel() == 0:
        return
    first, last = int(indices[0]), int(indices[-1])
    require(
        first >= 0 and last < out.numel(),
        f"Expected indices below {out.numel()}, found {first} to {last}.",
    )
    out.detach().index_add_(0, indices, values.detach())


def draw_indices(seed: int, rotation: int, numel: int, out: Tensor) -> None:
    """Fill out with distinct, ascending indices: RandomIndices in kernels/codecs/sparse.h."""
    require_flat("indices", out, torch.int32)
    count = out.numel()
    require(
        count <= numel < 2**31,
        f"Expected to draw at most numel indices, with numel below 2^31, found {count} of {numel}.",
    )
    require(0 <= rotation < max(numel, 1), f"Expected a rotation below {numel}, found {rotation}.")
    if count == 0:
        return
    first = 0
    if rotation > 0:
        first = (numel - rotation) * count // numel
        first += int(_draw(np.array([first]), seed, numel, count)[0]) + rotation < numel
    runs = (np.arange(count) + first) % count
    indices = _draw(runs, seed, numel, count) + rotation
    out.numpy()[:] = np.where(indices < numel, indices, indices - numel)


def _draw(runs: Integers, seed: int, numel: int, count: int) -> Integers:
    """Return the index drawn from each run, before the rotation."""
    low, high = (np.uint32(seed >> shift & 0xFFFFFFFF) for shift in (0, 32))
    begins, ends = runs * numel // count, (runs + 1) * numel // count
    bits = random_bits(runs.astype(np.uint32), low, high).astype(np.uint64)
    offsets = bits * (ends - begins).astype(np.uint64) >> np.uint64(32)
    indices: Integers = begins + offsets.astype(np.int64)
    return indices


def _ascends(indices: Integers, numel: int) -> bool:
    bounded = np.concatenate([[-1], indices, [numel]])
    return bool((np.diff(bounded) > 0).all()) or indices.size == 0


def _whole_words(bits: int) -> int:
    """Return ``bits``, rounded up to whole words."""
    return -(-bits // _WORD_BITS) * _WORD_BITS


def _check_packed(packed: Tensor, indices: Tensor, high_bits: int, low_bits: int) -> None:
    require_flat("indices", indices, torch.int32)
    require_flat("packed indices", packed, torch.uint8)
    require(0 <= low_bits < 32, f"Expected 0 to 31 low bits, found {low_bits}.")
    expected = (_whole_words(high_bits) + _whole_words(indices.numel() * low_bits)) // 8
    require(
        packed.numel() == expected,
        f"Expected {expected} bytes for {indices.numel()} packed indices, found {packed.numel()}.",
    )
