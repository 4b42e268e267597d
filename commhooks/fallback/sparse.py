"""What sparse hooks compute on a CPU: csrc/sparse/selection.h and csrc/sparse/indices.h."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commhooks.fallback.checks import require, require_flat, warn_once
from commhooks.fallback.codes import random_bits

_MOST_ELEMENTS = 2**31 - 1

_WORD_BITS = 64

Keys = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]


def select_largest(gradient: Tensor, error: Tensor | None, count: int) -> Tensor:
    """Add error to gradient; return the indices of ``count`` largest magnitudes, equal ones first.

    Infinities and NaN count as larger than all numbers.
    """
    numel = gradient.numel()
    require(0 <= count <= numel, f"Expected to select 0 to {numel} elements, found {count}.")
    return _indices(_largest(_keys_of_sum(gradient, error), count))


def select_largest_of_chunks(
    gradient: Tensor, error: Tensor | None, chunk: int, count: int
) -> Tensor:
    """Add error to gradient; select ``count`` of each ``chunk`` elements as select_largest does."""
    require(
        1 <= count <= chunk,
        f"Expected to select 1 to {chunk} elements of each chunk, found {count}.",
    )
    keys = _keys_of_sum(gradient, error)
    starts = range(0, gradient.numel(), chunk)
    found = [start + _largest(keys[start : start + chunk], count) for start in starts]
    return _indices(np.concatenate([np.empty(0, np.int64), *found]))


def select_above(gradient: Tensor, error: Tensor | None, threshold: float) -> Tensor:
    """Add error to gradient; return the indices of magnitudes of at least ``threshold``."""
    require(threshold > 0, f"Expected a threshold above 0, found {threshold:g}.")
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
    _check(gradient, error)
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


def _check(gradient: Tensor, error: Tensor | None) -> None:
    require(
        gradient.device.type == "cpu" and gradient.dtype in (torch.float32, torch.float64),
        f"Expected gradients in float32 or float64 on the CPU, found {gradient.dtype} on "
        f"{gradient.device}.",
    )
    require(
        gradient.dim() == 1 and gradient.is_contiguous(),
        f"Expected flat, contiguous gradients, found shape {list(gradient.shape)} with strides "
        f"{list(gradient.stride())}.",
    )
    require(
        gradient.numel() <= _MOST_ELEMENTS,
        f"Expected fewer than 2^31 gradient elements in a bucket, found {gradient.numel()}.",
    )
    require(
        error is None
        or (
            error.device.type == "cpu"
            and error.dtype == gradient.dtype
            and error.shape == gradient.shape
            and error.is_contiguous()
        ),
        f"Expected errors with the shape and dtype of the gradients, {list(gradient.shape)} in "
        f"{gradient.dtype}, found {None if error is None else list(error.shape)}.",
    )


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
