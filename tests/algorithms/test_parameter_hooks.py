"""Hooks that change parameters, with unusual parameters and uneven inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks

HOOKS: list[dict[str, Any]] = [
    {"name": "gossip", "what": "parameters"},
    {"name": "gossip", "what": "gradients", "average_every": 1},
    {"name": "push_sum"},
    {"name": "local_sgd", "period": 2},
    {"name": "diloco", "period": 2},
    {"name": "diloco", "period": 2, "delay": 2, "merge": 0.5},
]
names = pytest.mark.parametrize("config", HOOKS, ids=lambda config: str(list(config.values())))


class Odd(nn.Module):
    """Complex, channels_last, strided, empty and scalar parameters."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        shapes: dict[str, tuple[int, ...]] = {
            "last": (4, 3, 2, 2),
            "turned": (5, 3),
            "none": (0, 2),
        }
        tensors = {name: torch.randn(s, generator=generator) for name, s in shapes.items()}
        tensors["last"] = tensors["last"].contiguous(memory_format=torch.channels_last)
        tensors["turned"] = tensors["turned"].T
        tensors["scalar"] = torch.randn((), generator=generator)
        tensors["complex"] = torch.randn(3, 2, generator=generator, dtype=torch.complex64)
        self.values = nn.ParameterDict(tensors)

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(value * scale).abs().sum() for value in self.values.values()]).sum()


def train(rank: int, size: int, config: dict[str, Any], steps: int) -> dict[str, Tensor]:
    model = commhooks.DistributedDataParallel(Odd(rank), init_sync=False, bucket_cap_mb=1e-4)
    commhooks.register(model, config)
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(())).backward()
    return {name: value.detach() for name, value in model.module.values.items()}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, marks=[pytest.mark.exhaustive] if index in (1, 4) else [])
        for index, config in enumerate(HOOKS)
    ],
    ids=lambda config: str(list(config.values())),
)
def test_every_kind_of_parameter_converges_to_the_mean(
    run_ranks: Any, config: dict[str, Any]
) -> None:
    """Without an optimizer, only the hook changes parameters."""
    start = [dict(Odd(rank).values) for rank in range(3)]
    results = run_ranks(train, 3, config, 80)
    for name in start[0]:
        mean = torch.stack([values[name].detach() for values in start]).mean(0)
        for found in results:
            torch.testing.assert_close(found[name], mean, rtol=1e-4, atol=1e-5)
            assert found[name].stride() == start[0][name].stride()


def run_out(rank: int, size: int, config: dict[str, Any]) -> tuple[Tensor, bool]:
    torch.manual_seed(0)
    model = commhooks.DistributedDataParallel(nn.Linear(3, 2))
    commhooks.register(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(rank + step))).sum().backward()
            optimizer.step()
    return model.module.weight.detach(), bool(model.module.weight.isfinite().all())


@names
def test_uneven_inputs(run_ranks: Any, config: dict[str, Any]) -> None:
    (first, is_finite), *others = run_ranks(run_out, 3, config)
    assert is_finite
    for weight, _ in others:
        assert torch.equal(weight, first)
