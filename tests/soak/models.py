"""The models that trials train; all take (n, 16) inputs and return (n, 4) outputs."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS"]


class Branches(nn.Module):
    """Uses one of two layers per call; which one differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.either = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])
        self.last = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x))
        return self.last(self.either[int(x.sum() > 0)](hidden))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)
    ),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 4),
    ),
    "embedding": lambda: nn.Sequential(
        nn.Hardtanh(0.0, 49.0), _Rounded(), nn.Embedding(50, 8), nn.Flatten(), nn.Linear(128, 4)
    ),
    "branches": Branches,
}


class _Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 9).long().clamp(0, 49)
