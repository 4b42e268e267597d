"""The parameters of a bucket, as hooks that average models send and change them.

Note [Parameters change in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook may write to the parameters of its bucket, and only to these, as soon as it runs. By then
autograd has accumulated their gradients, so every node that hands one of them a gradient has run,
and will not read its saved copies again; nodes of other parameters still run. Nothing else reads
them before backward() is over: it waits for all hooks, and the optimizer comes after it.

Two things could still read one: a node that saved it without a gradient, ``parameter.detach() * x``
for example, and a second backward over a retained graph. The in-place methods used here increment
the version that a tensor and its detached views share, so autograd then raises "modified by an
inplace operation" instead of computing with other numbers; ``.data`` would bypass that. An
optimizer's step has the same effect in the same places.

So at the hook of step t the parameters are those after t optimizer steps, and the optimizer applies
the gradients of step t, which were computed at these parameters, to what the hook turns them into:

    x(t+1) = mixed(x(t)) - optimizer's step along g(x(t))

After a failed step some ranks may have mixed a bucket and others not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reducer import GradBucket


def parameters_of(bucket: GradBucket) -> list[Tensor]:
    """Return the parameters of a bucket, complex ones as real views, as their gradients are."""
    return [real_view(parameter) for parameter in bucket.parameters()]


def real_view(parameter: Tensor) -> Tensor:
    """Return a parameter in the form that its gradient has in the bucket."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a meta tensor with the shape and strides of the gradient in a bucket."""
    real = real_view(parameter)
    flat = torch.empty(real.numel(), dtype=real.dtype, device="meta")
    return GradBucket(flat, [real], [""]).gradients()[0]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new flat tensor of all elements, each tensor's in row-major order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def store(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the result of :func:`pack`, or numbers in its order, into the tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), views)
