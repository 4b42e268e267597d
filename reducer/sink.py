"""Let backward reach all outputs of a forward, including those that the loss does not use.

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

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__: list[str] = []


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
