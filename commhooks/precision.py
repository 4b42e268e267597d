"""From half precision to what is computed and kept in, and back."""

import torch
from torch import Tensor

__all__ = ["at_least_float32", "fit"]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """In which numbers are kept that are added up over ranks and steps."""
    return torch.promote_types(dtype, torch.float32)


def fit(values: Tensor, dtype: torch.dtype, share: int = 1) -> Tensor:
    """Rounded to ``dtype``; finite numbers beyond its range, or that share of it, are cut.

    With error feedback, what is rounded or cut off remains to be sent. Infinity there would be the
    end: the error would stay as it is, and be too large again in the next step.
    """
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        largest = torch.finfo(dtype).max / share
        values = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
    return values.to(dtype)
