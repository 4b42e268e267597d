"""Models whose gradients have the sizes that matter; their arithmetic is kept cheap on purpose.

What is measured here is communication, so a backward should cost little besides writing gradients:
that is the hardest case for a reducer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from commhooks.lab.models import Transformer


class ManySmall(nn.Module):
    """2000 parameters of 256 elements each: nothing but overhead per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(256) for _ in range(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (256,)."""
        return torch.stack([vector * x for vector in self.vectors])

    @staticmethod
    def example_input() -> torch.Tensor:
        """One vector."""
        return torch.randn(256)


class ThreeLayers(Transformer):
    """38 MB, and enough arithmetic for some of the communication to hide behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.layers[:3]

    @staticmethod
    def example_input() -> torch.Tensor:
        """128 vectors."""
        return torch.randn(128, 512)


MODELS: dict[str, Callable[[], Transformer | ManySmall]] = {
    "transformer-151MB": Transformer,
    "transformer-50MB": functools.partial(Transformer, layers=4),
    "transformer-25MB": functools.partial(Transformer, layers=2),
    "transformer-38MB": ThreeLayers,
    "2000x256": ManySmall,
}


def parameter_shapes(kind: Callable[[], nn.Module]) -> list[torch.Size]:
    """Of a model that is not made."""
    with torch.device("meta"):
        return [parameter.shape for parameter in kind().parameters()]
