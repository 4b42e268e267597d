"""A sample of some parameters of a bucket, as a bucket of its own."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from reducer import GradBucket

__all__ = ["Residual", "draw_sample"]

Residual = Callable[[str, Tensor], Tensor | None]
"""Returns what is to be added to the gradient of a parameter, flat, as it lies in memory."""


def draw_sample(
    bucket: GradBucket, names: Sequence[str], residual: Residual, limit: int, turn: int
) -> GradBucket:
    """Return gradient plus residual of about ``limit`` elements of the parameters ``names``.

    Whole parameters, as low-rank hooks need them, beginning with another one in each ``turn``; of
    larger ones, evenly spaced rows. The dtype is that of the bucket.
    """
    positions = [i for i, name in enumerate(bucket.names) if name in set(names)]
    start = turn % len(positions)
    parts: dict[str, Tensor] = {}
    free = limit
    for i in (*positions[start:], *positions[:start]):
        name, gradient = bucket.names[i], bucket.gradients()[i]
        if parts and gradient.numel() > free:
            break
        added = residual(name, gradient)
        p = gradient if added is None else gradient + _shaped(added, gradient)
        parts[name] = p[rows] if (rows := _rows(p, limit)) is not None else p
        free -= parts[name].numel()
    return _as_bucket(parts, bucket)


def _rows(tensor: Tensor, limit: int) -> slice | None:
    """Return which rows of a parameter to take, None for all."""
    if tensor.dim() == 0 or tensor.numel() <= limit:
        return None
    return slice(None, None, math.ceil(tensor.numel() / limit))


def _as_bucket(parts: dict[str, Tensor], whole: GradBucket) -> GradBucket:
    buffer = whole.buffer()
    stand_ins = [torch.empty_like(part, dtype=buffer.dtype) for part in parts.values()]
    flat = buffer.new_empty(sum(part.numel() for part in parts.values()))
    bucket = GradBucket(flat, stand_ins, list(parts), step=whole.step)
    for view, part in zip(bucket.gradients(), parts.values(), strict=True):
        view.copy_(part)
    return bucket


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Return numbers as they lie in the memory of ``like``, in its shape."""
    return flat.to(like.device).as_strided(like.shape, like.stride())
