"""Models that commands find by name, as ``support.small_models:make``."""

import torch
from torch import Tensor, nn

from commhooks import CommHook, Communicator, GradBucket


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


def partly() -> nn.Module:
    """A model that does not use its last layer, whose bucket comes first."""
    return _Partly()


class _Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.used(inputs)
        return result

    example_input = staticmethod(Small.example_input)


def without_input() -> nn.Module:
    """A model that does not."""
    return nn.Linear(3, 2)


def no_tensor() -> nn.Module:
    """A model that returns nothing that could be a loss."""
    return _Mute()


class _Mute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: torch.Tensor) -> str:  # type: ignore[override]
        return "nothing"


def vectors() -> torch.Tensor:
    """Input for the latter two."""
    return torch.randn(4, 3)


class Gathering(CommHook):
    """Averages with an all-gather of far too much, and has no formula of its bytes."""

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        return (await comm.all_gather(bucket.buffer().repeat(8, 1)))[:, 0].mean(0)
