"""Find and replace tensors in the nested structures that a forward takes or returns.

Note [Sink]
~~~~~~~~~~~
All outputs pass through one autograd node. When backward reaches that node, an output that the
loss does not use has no gradient. The node passes "no gradient" on, down to the parameters, so that
these arrive at the reducer like all others::

    forward   ---> output 0 ---+--------+---> loss
              ---> output 1 ---| sink   |---> (unused)
    backward  <--- gradient ---|        |<---
              <--- none     ---+--------+
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, sets, mappings and dataclasses.

    Also yields the tensors in remote references that this process owns. Structures may be linked
    deeply or in a cycle; each tensor is yielded once.
    """
    seen: dict[int, Any] = {}  # the objects as well, so that no other one gets the id
    pending = [value]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        items: Iterable[Any] = ()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            items = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        elif dist.rpc.is_available() and isinstance(value, dist.rpc.RRef) and value.is_owner():
            items = [value.local_value()]
        pending += reversed([*items])


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of a nested structure with ``function`` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # the constructor may take other arguments: defaultdict
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(
            value, **{name: map_tensors(function, item) for name, item in fields.items()}
        )
    return value


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, clones: bool, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None stays None instead of becoming zeros
        return tuple(output.clone() if clones else output for output in outputs)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)


def through_sink(outputs: Any, *, clones: bool) -> Any:
    """Return ``outputs``, in any structure that torch's pytree knows, passed through the sink.

    ``clones``: clone the tensors, so that the caller may modify them in place.
    """
    leaves, spec = tree_flatten(outputs)
    indices = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not indices:
        return outputs
    apply: Any = _Sink.apply
    for index, tensor in zip(indices, apply(clones, *[leaves[i] for i in indices]), strict=True):
        leaves[index] = tensor
    return tree_unflatten(leaves, spec)
