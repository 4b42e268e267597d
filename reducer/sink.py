"""Lets backward reach everything that forward returned, whatever the loss makes use of.

Note [Sink]
~~~~~~~~~~~
All outputs pass through one autograd node. When backward reaches it, outputs that the loss does
not use have no gradient, and as "no gradient" that travels on to their parameters, which so arrive
at the reducer like all others::

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
        ctx.set_materialize_grads(False)  # none stays none, and does not become zeros
        return tuple(output.clone() if clones else output for output in outputs)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)


def through_sink(outputs: Any, *, clones: bool) -> Any:
    """``outputs``, in whatever structure torch's pytree knows, behind the sink.

    ``clones``: so that they may be modified in place.
    """
    leaves, spec = tree_flatten(outputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return outputs
    apply: Any = _Sink.apply
    for place, tensor in zip(places, apply(clones, *[leaves[i] for i in places]), strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, spec)
