"""Models and training functions for tests of comparisons, which the ranks' processes import."""

import os
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WIDTH = 96
PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    @staticmethod
    def example_input() -> Tensor:
        return torch.randn(4, WIDTH)


def net() -> nn.Module:
    return Net()


def without_input() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def batch() -> Tensor:
    return torch.randn(4, WIDTH)


class Dropping(Net):
    """Gradients that differ between runs unless torch's generator is seeded."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x))


class Erratic(Net):
    """Gradients that always differ between runs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.SystemRandom().random()


class Divergent(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("inf")


class Talking(Net):
    """Returns a dict with a loss, as some libraries do."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x, "loss": super().forward(x).square().sum()}


class Mute(Net):
    def forward(self, x: Tensor) -> str:  # type: ignore[override]
        return "nothing"


class Mortal(Net):
    """Ends the process of rank 1 after some steps, if it uses the network ``interface``."""

    interface = "lo"
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Mortal.calls += 1
        is_there = os.environ["GLOO_SOCKET_IFNAME"] == self.interface
        if is_there and torch.distributed.get_rank() == 1 and Mortal.calls == 12:
            print("farewell", flush=True)
            os._exit(7)
        return super().forward(x)


class MortalOverLinks(Mortal):
    interface = "link0"


def train(model: nn.Module, rank: int, world_size: int) -> Iterator[Callable[[], float]]:
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    held_out = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))

    def validate() -> float:
        return mse_loss(model(held_out), held_out @ teacher).item()

    while True:
        x = torch.randn(16, WIDTH)
        optimizer.zero_grad()
        mse_loss(model(x), x @ teacher).backward()
        optimizer.step()
        yield validate


def train_briefly(model: nn.Module, rank: int, world_size: int) -> Iterator[Callable[[], float]]:
    yield lambda: 0.0


def train_without_validation(model: nn.Module, rank: int, world_size: int) -> Iterator[float]:
    while True:
        yield 0.5


def no_generator(model: nn.Module, rank: int, world_size: int) -> None:
    pass
