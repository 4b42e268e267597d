"""Choose the precision of sums and of state, and cast to the precision that is sent."""

import torch
from torch import Tensor

from reducer import native


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over ranks and steps: ``dtype``, but not less than float32."""
    return torch.promote_types(dtype, torch.float32)


def saturating_cast(values: Tensor, dtype: torch.dtype, headroom: int = 1) -> Tensor:
    """Cast to ``dtype``; clamp finite numbers to its range, divided by ``headroom``.

    With error feedback, the difference between the numbers and their cast is sent in later steps.
    A cast to infinity would make that impossible: the error would keep its size, and be out of
    range again in the next step. NaN and infinity are not changed.
    """
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        largest = torch.finfo(dtype).max / headroom
        values = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
    return values.to(dtype)


def scaled_cast(values: Tensor, scale: float, out: Tensor) -> Tensor:
    """Write ``scale * values`` to ``out`` in its dtype, in one pass over the memory; return it.

    On the CPU as the reducer packs buckets for its own hooks: torch would write the product first.
    """
    is_plain = values.is_cpu and values.is_contiguous() and not values.is_neg()
    if is_plain and native.has_kernels("cpu"):
        native.pack([values], out, scale)
        return out
    return torch.mul(values, scale, out=out)
