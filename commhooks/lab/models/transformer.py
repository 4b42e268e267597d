"""151 MB of parameters in the shapes of a transformer, with very little arithmetic.

Backward does little besides writing gradients, which is the hardest case for communication.
"""

import torch
from torch import Tensor, nn

__all__ = ["Transformer"]

_LAYERS, _WIDTH = 12, 512


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(q * k + v)
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Transformer(nn.Module):
    """12 layers of width 512. Attention itself is left out, because it has no parameters."""

    def __init__(self, layers: int = _LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``, (batch, 512), to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x

    @staticmethod
    def example_input() -> Tensor:
        """Return eight vectors."""
        return torch.randn(8, _WIDTH)
