"""Models whose gradients have realistic sizes, and whose arithmetic is cheap.

The benchmarks measure communication. A backward that does little but write gradients is the hardest
case for a reducer.
"""

from collections.abc import Callable

import torch
from torch import nn

from commhooks.lab.networks import Transformer


class ManySmall(nn.Module):
    """2000 parameters of 256 elements each, to measure the overhead per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(256) for _ in range(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all parameters times ``x`` (256,)."""
        return torch.stack([vector * x for vector in self.vectors])

    @staticmethod
    def example_input() -> torch.Tensor:
        """Return one vector."""
        return torch.randn(256)


def two_layers() -> Transformer:
    """Return 25 MB of parameters."""
    return Transformer(layers=2)


def four_layers() -> Transformer:
    """Return 50 MB of parameters."""
    return Transformer(layers=4)


class ThreeLayers(Transformer):
    """38 MB of parameters, with enough arithmetic to hide some of the communication."""

    def __init__(self) -> None:
        super().__init__(layers=3)

    @staticmethod
    def example_input() -> torch.Tensor:
        """Return 128 vectors."""
        return torch.randn(128, 512)


def parameter_shapes(kind: Callable[[], nn.Module]) -> list[torch.Size]:
    """Return the shapes of the parameters of a model, without their memory."""
    with torch.device("meta"):
        return [parameter.shape for parameter in kind().parameters()]
