"""Gradients with many equal, many zero, very small or non-finite elements."""

import math

import torch
from torch import Tensor

KINDS = ["normal", "equal", "zeros", "mostly zeros", "denormals", "few values", "not finite"]


def draw(kind: str, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(length + seed)
    normal = torch.randn(length, generator=generator, dtype=torch.float64)
    places = torch.rand(length, generator=generator)
    if kind == "equal":
        normal = normal.sign() * 0.5
    elif kind == "zeros":
        normal *= 0  # of both signs
    elif kind == "mostly zeros":
        normal[places > 0.02] = 0
    elif kind == "denormals":
        normal *= torch.finfo(dtype).tiny / 8
    elif kind == "few values":
        normal = (4 * normal).round() / 4
    elif kind == "not finite":
        normal[places < 0.01] = math.nan
        normal[places > 0.99] = -math.inf
    return normal.to(dtype)
