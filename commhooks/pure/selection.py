"""Selects the elements that a sparse hook sends. See csrc/sparse/selection.h."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commhooks.pure.requirements import require
from commhooks.pure.slowness import warn_once

__all__ = ["select_above", "select_largest", "select_largest_of_chunks"]

_MOST_ELEMENTS = 2**31 - 1

Keys = npt.NDArray[Any]


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


def _largest(keys: Keys, count: int) -> npt.NDArray[np.int64]:
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


def _indices(found: npt.NDArray[np.int64]) -> Tensor:
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
