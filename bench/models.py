"""Models whose gradients have realistic sizes, and whose arithmetic is cheap.

The benchmarks measure communication. A backward that does little but write gradients is the hardest
case for a reducer.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from bench.fidelity.tasks import Text, adamw
from commhooks.lab.networks import Transformer
from examples.gpt import GPTConfig

LARGE = GPTConfig(layers=6, heads=6, width=384, block_size=64)
"""The demo's GPT, enlarged to 10.8 million parameters."""
_TEXT = Text(LARGE, sequences=2, validation_batches=8)


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


def large_gpt() -> nn.Module:
    """Return the enlarged GPT."""
    return _TEXT.model()


def train(model: nn.Module, rank: int, world_size: int) -> Iterator[Callable[[], float]]:
    """Train it with the demo's AdamW, at a constant learning rate after a linear warm-up."""
    held_out = _TEXT.validation(rank, world_size)
    module: nn.Module = getattr(model, "module", model)
    batches = (_TEXT.batch(0, step, rank) for step in itertools.count())
    recipe = adamw(lr=2.5e-4, fused=True)  # of this, 5e-4, 1e-3 and 2e-3 the best
    for _ in recipe.train(model, batches, lambda step: min(1.0, (step + 1) / 20)):
        yield lambda: float(module(*held_out))


def parameter_shapes(kind: Callable[[], nn.Module]) -> list[torch.Size]:
    """Return the shapes of the parameters of a model, without their memory."""
    with torch.device("meta"):
        return [parameter.shape for parameter in kind().parameters()]
