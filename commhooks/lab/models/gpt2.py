"""GPT-2 small (Radford et al. 2019), 124 439 808 parameters in 148 tensors.

Letters: B batch, T time, C width, H heads.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

__all__ = ["GPT2Small"]

_LAYERS, _WIDTH, _HEADS, _CONTEXT, _VOCABULARY = 12, 768, 12, 1024, 50257


class _Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as in the published weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = _Conv1D(_WIDTH, 3 * _WIDTH)
        self.c_proj = _Conv1D(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.c_attn(x).unflatten(-1, (3, _HEADS, -1))  # (B, T, 3, H, C / H)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, C / H)
        mixed: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return mixed


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = _Conv1D(_WIDTH, 4 * _WIDTH)
        self.c_proj = _Conv1D(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        narrow: Tensor = self.c_proj(gelu(self.c_fc(x), approximate="tanh"))
        return narrow


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(_WIDTH)
        self.attn = _Attention()
        self.ln_2 = nn.LayerNorm(_WIDTH)
        self.mlp = _MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class GPT2Small(nn.Module):
    """Maps tokens and targets, int64 (B, T), to the mean cross-entropy. There is no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(_VOCABULARY, _WIDTH)
        self.wpe = nn.Embedding(_CONTEXT, _WIDTH)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)
        self.h = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.ln_f = nn.LayerNorm(_WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = linear(self.ln_f(x), self.wte.weight)
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    @staticmethod
    def example_input() -> tuple[Tensor, Tensor]:
        """Return one sequence of 128 tokens and its targets; a CPU takes seconds for it."""
        window = torch.randint(_VOCABULARY, (1, 129))
        return window[:, :-1], window[:, 1:]
