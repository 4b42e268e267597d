"""Models that commands find by name, as ``small_models:make``."""

import torch
from torch import nn


class Small(nn.Sequential):
    """Three layers, 40 kB."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))

    @staticmethod
    def example_input() -> torch.Tensor:
        """Four vectors."""
        return torch.randn(4, 64)


def make() -> nn.Module:
    """A model that brings its input."""
    return Small()


def without_input() -> nn.Module:
    """A model that does not."""
    return nn.Linear(3, 2)


def no_tensor() -> nn.Module:
    """A model that returns something else than a loss."""
    return _Pair()


class _Pair(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return super().forward(x), 1


def vectors() -> torch.Tensor:
    """Input for the latter two."""
    return torch.randn(4, 3)
