"""GPT-2 (Radford et al. 2019), as far as its shapes and its arithmetic are concerned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

VOCABULARY = 50257


@dataclass(frozen=True)
class Shape:
    """Defaults: GPT-2 small, 124 million parameters."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    positions: int = 1024


SMALL = Shape()
MEDIUM = Shape(layers=24, heads=16, width=1024)


class Block(nn.Module):
    """Attention and MLP, normalised first."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, time, width)."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The loss of predicting each token from those before it."""

    def __init__(self, shape: Shape = SMALL) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (batch, time) of int64."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = linear(self.norm(x[:, :-1]), self.tokens.weight)
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def parameter_shapes(shape: Shape) -> list[torch.Size]:
    """Of a model that is not made."""
    with torch.device("meta"):
        return [parameter.shape for parameter in GPT2(shape).parameters()]
