"""The parameters of a bucket, as hooks that mix models send and change them.

Note [Parameters change in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook may write to the parameters of its bucket, and only to these, as soon as it runs. By then
autograd has accumulated their gradients, so every node that hands one of them a gradient has run,
and what it saved of them is used up; nodes of other parameters still run. Nobody else reads them
before backward() is over: it waits for all hooks, and the optimizer comes after it.

What could still read one is a node that saved it without a gradient, `parameter.detach() * x` for
example, or a second backward over a retained graph. As the in-place methods used here count up the
version that a tensor and its detached views share, autograd then raises "modified by an inplace
operation" rather than compute with other numbers; `.data` would evade that. An optimizer's step has
the same effect in the same places.

So at the hook of step t the parameters are what t optimizer steps have made of them, and what the
hook makes of them is what step t's gradients, of the parameters as they were, are applied to:

    x(t+1) = mixed(x(t)) - optimizer's step along g(x(t))

After a step that failed some ranks may have mixed a bucket and others not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reducer import GradBucket

__all__ = ["pack", "parameters_of", "real_view", "store"]


def parameters_of(bucket: GradBucket) -> list[Tensor]:
    """Those of a bucket, complex ones as their real views, as gradients are in the bucket."""
    return [real_view(parameter) for parameter in bucket.parameters()]


def real_view(parameter: Tensor) -> Tensor:
    """As its gradient is in the bucket."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """A new flat tensor of all elements, each tensor's in row-major order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def store(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Writes what :func:`pack` gave, or numbers in its order, into the tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), views)
