"""A small GPT-2 style language model over bytes.

Pre-norm blocks of causal self-attention and an MLP, learned positions, and an output layer that
shares its weight with the byte embedding (Radford et al. 2019, section 2.3).

Shape legend: B batch, T time (positions), C width (channels), H heads, V vocabulary (256 bytes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model. The defaults give 0.8 million parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    block_size: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), found {self.dropout}")
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, found {self.width} and {self.heads} heads"
            )


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to the positions before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        dropout = self.dropout if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return cast("Tensor", self.project(y.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """Attention, then an MLP four times as wide, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        return x + cast("Tensor", self.dropout(self.contract(hidden)))


class GPT(nn.Module):
    """Map bytes (B, T), int64, to the mean cross-entropy in nats of the bytes that follow."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.block_size, config.width)
        blocks = [Block(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.apply(_initialize)
        # Each block adds twice to the residual stream; this scale keeps its variance near one.
        for block in blocks:
            for last in (block.attention.project, block.contract):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = linear(self.norm(x), self.token_embedding.weight)  # (B, T, V)
        # In bfloat16 a loss has three digits.
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
