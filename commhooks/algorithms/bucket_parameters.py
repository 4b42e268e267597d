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

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from commhooks.codecs.finite import select
from reducer import GradBucket

_PIECE = 1 << 20
"""Elements of the tensors that :func:`pieces` yields together."""


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


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the result of :func:`pack`, in the shapes of the tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def store(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the result of :func:`pack`, or numbers in its order, into the tensors."""
    torch._foreach_copy_(list(tensors), unpack(flat, tensors))


def store_if(condition: Tensor, values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each value to its tensor if ``condition`` is true. Does not wait for the device."""
    selected = [select(condition, v, t) for v, t in zip(values, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), selected)


def pieces(*lists: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yield the tensors of all lists, some at a time; of large ones, views of some rows.

    Temporary tensors of a piece have about a million elements, whatever the model's size, and many
    small tensors share operations. Tensors at the same place need the same shape.
    """
    group: list[tuple[Tensor, ...]] = []
    elements = 0
    for row in (row for tensors in zip(*lists, strict=True) for row in _rows(tensors)):
        if group and elements + row[0].numel() > _PIECE:
            yield [*map(list, zip(*group, strict=True))]
            group, elements = [], 0
        group.append(row)
        elements += row[0].numel()
    if group:
        yield [*map(list, zip(*group, strict=True))]


def _rows(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    first = tensors[0]
    if first.numel() <= _PIECE:
        return iter([tensors])
    length = max(1, _PIECE * len(first) // first.numel())
    return zip(*(torch.split(tensor, length) for tensor in tensors), strict=True)
