"""Whether all numbers are finite, in one pass."""

import torch
from torch import Tensor

__all__ = ["all_finite"]


def all_finite(tensor: Tensor) -> Tensor:
    """() of bool, on the tensor's device; true for an empty tensor. Does not wait for the device.

    ``isfinite().all()`` makes several tensors of this size on the way; the smallest and the largest
    number tell as much, since NaN comes through.
    """
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(tensor.aminmax()).isfinite().all()
