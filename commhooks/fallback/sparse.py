"""Arithmetic of sparse hooks on a CPU, as in csrc/sparse/selection.h and csrc/sparse/indices.h."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commhooks.fallback.codes import random_bits
from commhooks.fallback.warning import warn_once

_WORD_BITS = 64

Keys = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]


def select_largest(gradient: Tensor, error: Tensor | None, count: int) -> Tensor:
    """Add error to gradient; return the indices of ``count`` largest magnitudes, equal ones first.

    Infinities and NaN count as larger than all numbers.
    """
    return _indices(_largest(_keys_of_sum(gradient, error), count))


def select_largest_of_chunks(
    gradient: Tensor, error: Tensor | None, chunk: int, count: int
) -> Tensor:
    """Add error to gradient; select ``count`` of each ``chunk`` elements as select_largest does."""
    keys = _keys_of_sum(gradient, error)
    starts = range(0, gradient.numel(), chunk)
    found = [start + _largest(keys[start : start + chunk], count) for start in starts]
    return _indices(np.concatenate([np.empty(0, np.int64), *found]))


def select_above(gradient: Tensor, error: Tensor | None, threshold: float) -> Tensor:
    """Add error to gradient; return the indices of magnitudes of at least ``threshold``."""
    keys = _keys_of_sum(gradient, error)
    bound = _keys(torch.tensor([threshold], dtype=gradient.dtype))[0]
    return _indices(np.flatnonzero(keys >= max(bound, 1)))


def _largest(keys: Keys, count: int) -> Integers:
    """Return the positions of ``count`` keys, or of all if there are fewer."""
    if count == 0 or count >= keys.size:
        return np.arange(min(count, keys.size))
    smallest = np.partition(keys, keys.size - count)[keys.size - count]
    found = np.flatnonzero(keys >= smallest)
    if found.size > count:  # too many are equal to the smallest one: keep the first of them
        equal = np.flatnonzero(keys[found] == smallest)
        found = np.delete(found, equal[count - found.size :])
    return found


def _keys_of_sum(gradient: Tensor, error: Tensor | None) -> Keys:
    """Add error to gradient, and return the bits of the magnitudes."""
    warn_once()
    if error is not None:
        gradient.detach().add_(error.detach())
    return _keys(gradient)


def _keys(numbers: Tensor) -> Keys:
    """Return the bits of |number|. They are ordered as the numbers, infinity and NaN last."""
    bits: Keys = numbers.detach().numpy()
    if numbers.dtype == torch.float32:
        return bits.view(np.int32) & np.int32(0x7FFFFFFF)
    return bits.view(np.int64) & np.int64(0x7FFFFFFFFFFFFFFF)


def _indices(found: Integers) -> Tensor:
    return torch.from_numpy(found.astype(np.int32))


def pack_indices(
    indices: Tensor, high_bits: int, low_bits: int, adds_rank: bool, out: Tensor
) -> None:
    """Write ascending indices as a bitmap and low bits: Note [Index code] in codecs/index_code."""
    numbers = indices.numpy().astype(np.int64)
    positions = numbers >> low_bits
    if adds_rank:
        positions += np.arange(numbers.size)
    _check_range(indices, (high_bits - adds_rank * (numbers.size - 1)) << low_bits)
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
    if not (is_complete and _ascends(indices, numel)):
        raise RuntimeError(
            f"Expected {count} ascending indices below {numel} in a message: it is corrupted, or "
            "ranks have different options."
        )


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Add values to out at ascending indices."""
    _check_range(indices, out.numel())
    out.detach().index_add_(0, indices, values.detach())


def draw_indices(seed: int, rotation: int, numel: int, out: Tensor) -> None:
    """Fill out with distinct, ascending indices: RandomIndices in kernels/codecs/sparse.h."""
    count = out.numel()
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


def _check_range(indices: Tensor, numel: int) -> None:
    ends = indices[:: max(indices.numel() - 1, 1)].tolist()  # numel may be beyond their dtype
    if ends and not 0 <= ends[0] <= ends[-1] < numel:
        raise RuntimeError(f"Expected indices below {numel}, found {ends}.")


def _whole_words(bits: int) -> int:
    """Return ``bits``, rounded up to whole words."""
    return -(-bits // _WORD_BITS) * _WORD_BITS
