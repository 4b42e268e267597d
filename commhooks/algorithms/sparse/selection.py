"""Choosing and placing the numbers of a sparse gradient.

Gradients are flat, float32 or float64; indices are int32 and ascending. Infinities and NaN count as
larger than all numbers, so that they are never left behind. On the CPU these are compiled loops, on
a GPU kernels, with the same results bit for bit.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from commhooks.kernels import backend_of, require, selection
from commhooks.kernels import sparse as kernels
from reducer import _C

__all__ = [
    "add_and_check",
    "correct_momentum",
    "draw_indices",
    "require_kernels",
    "scatter_add",
    "select_above",
    "select_largest",
]


def require_kernels(parameters: Mapping[str, Tensor]) -> None:
    """Raises CommHookError, with what to install, if the kernels for some of them cannot run."""
    for device in {parameter.device for parameter in parameters.values()}:
        require(device)


def select_largest(gradient: Tensor, error: Tensor | None, count: int) -> Tensor:
    """Adds ``error`` to ``gradient``; the indices of exactly ``count`` of the largest magnitude.

    One pass over the memory. Of equal numbers the first are chosen. Does not wait for the device.
    """
    if backend_of(gradient) is None:
        return _C.select_largest(gradient, error, count)
    return selection.select_largest(gradient, error, count)


def select_above(gradient: Tensor, error: Tensor | None, threshold: float) -> Tensor:
    """Adds ``error`` to ``gradient``; the indices of magnitudes of ``threshold`` or more.

    One pass over the memory. Waits for the device, to learn how many there are.
    """
    if backend_of(gradient) is None:
        return _C.select_above(gradient, error, threshold)
    return selection.select_above(gradient, error, threshold)


def add_and_check(gradient: Tensor, error: Tensor | None) -> Tensor:
    """Adds ``error`` to ``gradient``; (1,), NaN if some number is not finite then, else 0."""
    if backend_of(gradient) is not None:
        return selection.add_and_check(gradient, error)
    bad = _C.select_above(gradient, error, math.inf)
    return gradient.new_full((1,), math.nan if bad.numel() > 0 else 0.0)


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """``out[indices] += values``, all of one dtype."""
    if backend_of(out) is None:
        _C.scatter_add(values, indices, out)
    else:
        kernels.scatter_add(values, indices, out)


def draw_indices(numel: int, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """``count`` different indices below ``numel``, each of which has the same chance.

    On the device of ``like``, the same on all devices. From each of ``count`` runs, as equal as can
    be, of the circle of all indices, one index: see RandomIndices in codecs/sparse.h.
    """
    indices = like.new_empty(count, dtype=torch.int32)
    if count == 0:
        return indices
    seed, rotation = (
        int(torch.randint(limit, (), generator=generator)) for limit in (2**63 - 1, numel)
    )
    if backend_of(indices) is None:
        _C.draw_indices(seed, rotation, numel, indices)
    else:
        kernels.draw_indices(seed, rotation, numel, indices)
    return indices


def correct_momentum(gradient: Tensor, velocity: Tensor, error: Tensor, momentum: float) -> Tensor:
    """Adds ``momentum`` · ``velocity`` to ``gradient``; returns that plus ``error``."""
    if backend_of(gradient) is None:
        return gradient.add_(velocity, alpha=momentum) + error
    return kernels.correct_momentum(gradient, velocity, error, momentum)
