"""Rotates numbers before they are quantized. See Note [Rotation] in kernels/codecs/rotation.h."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commhooks.pure.requirements import require
from commhooks.pure.slowness import warn_once

__all__ = ["rotate"]

_ROTATION = 128

Numbers = npt.NDArray[Any]


def rotate(values: Tensor, added: Tensor | None, part_length: int, inverse: bool) -> None:
    """Set values to the rotation of values + added, part by part; with inverse, rotate back."""
    _check(values, values)
    if added is not None:
        _check(added, values)
    require(
        part_length > 0 or values.numel() == 0,
        f"Expected parts of at least one number, found {part_length}.",
    )
    warn_once()
    numbers: Numbers = values.detach().numpy()
    if added is not None:
        numbers += added.detach().numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # then the scale is NaN
        for start in range(0, numbers.size, max(part_length, 1)):
            _rotate_part(numbers[start : start + part_length], inverse=inverse)


def _rotate_part(part: Numbers, *, inverse: bool) -> None:
    changes = _signs(part.size)
    if not inverse:
        np.negative(part, out=part, where=changes)
    start = part.size // _ROTATION * _ROTATION
    _rotate_blocks(part[:start].reshape(-1, _ROTATION))
    size = _ROTATION // 2
    while size:
        if part.size & size:
            _rotate_blocks(part[start : start + size].reshape(1, size))
            start += size
        size //= 2
    if inverse:
        np.negative(part, out=part, where=changes)


def _rotate_blocks(blocks: Numbers) -> None:
    """Multiply each row by the Hadamard matrix over the root of its length, in place."""
    count, size = blocks.shape
    half = 1
    while half < size:
        pairs = blocks.reshape(count, size // (2 * half), 2, half)
        sums = pairs[:, :, 0] + pairs[:, :, 1]
        pairs[:, :, 1] = pairs[:, :, 0] - pairs[:, :, 1]
        pairs[:, :, 0] = sums
        half *= 2
    blocks *= blocks.dtype.type(_factor(size))


def _factor(size: int) -> float:
    """Return 1 / √size of a power of two."""
    halvings, is_odd = divmod(size.bit_length() - 1, 2)
    return 0.5**halvings * (math.sqrt(0.5) if is_odd else 1.0)


def _signs(count: int) -> npt.NDArray[np.bool_]:
    """Return which of the numbers of a part change their signs."""
    hashes = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(0x85EBCA77)
    return hashes >= np.uint32(0x80000000)


def _check(tensor: Tensor, values: Tensor) -> None:
    require(
        tensor.device.type == "cpu"
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.dtype in (torch.float32, torch.float64)
        and (tensor.shape, tensor.dtype) == (values.shape, values.dtype),
        "Expected flat, contiguous numbers on the CPU, of one length in float32 or float64, found "
        f"{list(tensor.shape)} in {tensor.dtype} on {tensor.device}.",
    )
