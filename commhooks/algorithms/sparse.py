"""Choosing and placing the numbers of a sparse gradient.

Gradients are flat, float32 or float64; indices are int32 and ascending. Infinities and NaN count as
larger than all numbers, so that they are never left behind. On the CPU these are compiled kernels;
elsewhere torch's operations, which choose arbitrarily among equal numbers.
"""

import math

from torch import Tensor

from reducer import _C

__all__ = ["add_and_check", "scatter_add", "select_above", "select_largest"]


def select_largest(gradient: Tensor, error: Tensor | None, count: int) -> Tensor:
    """Adds ``error`` to ``gradient``; the indices of exactly ``count`` of the largest magnitude.

    One pass over the memory. Of equal numbers the first are chosen.
    """
    if gradient.device.type == "cpu":
        return _C.select_largest(gradient, error, count)
    _add(gradient, error)
    return gradient.abs().topk(count, sorted=False).indices.sort().values.int()


def select_above(gradient: Tensor, error: Tensor | None, threshold: float) -> Tensor:
    """Adds ``error`` to ``gradient``; the indices of magnitudes of ``threshold`` or more.

    One pass over the memory.
    """
    if gradient.device.type == "cpu":
        return _C.select_above(gradient, error, threshold)
    _add(gradient, error)
    return (~(gradient.abs() < threshold)).nonzero().view(-1).int()


def add_and_check(gradient: Tensor, error: Tensor | None) -> Tensor:
    """Adds ``error`` to ``gradient``; (1,), NaN if some number is not finite then, else 0."""
    bad = select_above(gradient, error, math.inf)
    return gradient.new_full((1,), math.nan if bad.numel() > 0 else 0.0)


def scatter_add(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """``out[indices] += values``, all of one dtype."""
    if out.device.type == "cpu":
        _C.scatter_add(values, indices, out)
    else:
        out.index_add_(0, indices, values)


def _add(gradient: Tensor, error: Tensor | None) -> None:
    if error is not None:
        gradient.add_(error)
