"""Whether all numbers are finite, and what becomes of what is kept if they are not.

Note [Verdicts]
~~~~~~~~~~~~~~~
All ranks come to one verdict on what they have received, a () bool tensor on the gradients'
device: only if it is true may anything change that a hook keeps, and if not the result is NaN. On
the CPU the verdict is known at once, and :func:`is_known_false` spares a hook the rest. On a GPU
nobody waits for it: the hook goes on, sends what it always sends, and hands the verdict to whatever
writes.
"""

import torch
from torch import Tensor

from commhooks.kernels import backend_of, masked
from reducer import _C

__all__ = ["all_finite", "copy_if", "is_known_false", "nan_unless", "zero_unless"]


def all_finite(tensor: Tensor) -> Tensor:
    """() of bool, on the tensor's device; true for an empty tensor. Does not wait for the device.

    One pass over the memory. :meth:`GradBucket.all_finite` tells it of a bucket, as it comes,
    without.
    """
    return _C.all_finite(tensor)


def is_known_false(verdict: Tensor) -> bool:
    """Whether a verdict is false, where that is known without waiting. See Note [Verdicts]."""
    return backend_of(verdict) is None and not verdict


def copy_if(verdict: Tensor, source: Tensor, out: Tensor) -> None:
    """``out`` becomes ``source`` if the verdict is true. Does not wait for the device."""
    if backend_of(out) is not None:
        masked.copy_if(verdict, source, out)
    elif verdict:
        out.copy_(source)


def nan_unless(verdict: Tensor, tensor: Tensor) -> Tensor:
    """The tensor itself or a copy; NaN if the verdict is false. Does not wait for the device."""
    return _unless(verdict, tensor, torch.nan)


def zero_unless(verdict: Tensor, tensor: Tensor) -> Tensor:
    """The tensor itself or a copy; zeros if the verdict is false. Does not wait for the device."""
    return _unless(verdict, tensor, 0.0)


def _unless(verdict: Tensor, tensor: Tensor, number: float) -> Tensor:
    if backend_of(tensor) is None and verdict:
        return tensor
    return torch.where(verdict, tensor, number)
