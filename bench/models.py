"""Models whose gradients have the sizes that matter; their arithmetic is kept cheap on purpose.

What is measured here is communication, so a backward should cost little besides writing gradients:
that is the hardest case for a reducer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Transformer(nn.Module):
    """151 MB of parameters in the shapes of a 12-layer transformer of width 512."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(512),
                    "qkv": nn.Linear(512, 1536),
                    "out": nn.Linear(512, 512),
                    "up": nn.Linear(512, 2048),
                    "down": nn.Linear(2048, 512),
                }
            )
            for _ in range(12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, 512). Attention is left out: it has no parameters."""
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, dim=-1)
            x = x + layer["out"](q * k + v)
            x = x + layer["down"](layer["up"](x).relu())
        return x

    @staticmethod
    def example(generator: torch.Generator) -> torch.Tensor:
        """An input: eight vectors."""
        return torch.randn(8, 512, generator=generator)


class ManySmall(nn.Module):
    """2000 parameters of 256 elements each: nothing but overhead per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(256) for _ in range(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (256,)."""
        return torch.stack([vector * x for vector in self.vectors])

    @staticmethod
    def example(generator: torch.Generator) -> torch.Tensor:
        """An input: one vector."""
        return torch.randn(256, generator=generator)


MODELS: dict[str, Callable[[], Transformer | ManySmall]] = {
    "transformer-151MB": Transformer,
    "2000x256": ManySmall,
}
