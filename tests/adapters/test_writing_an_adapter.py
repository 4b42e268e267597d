"""The adapter of docs/writing-an-adapter.md does what the page says that adapters must do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pages import run_page
from torch import Tensor, nn

import commhooks

HOOKS: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "int8"},
    {"name": "topk", "density": 0.25, "warmup_steps": 0},
    {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0},
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Training:
    """A model that is trained by the adapter of the page, step by step."""

    def __init__(self, rank: int, page: dict[str, Any], hook: Any) -> None:
        self.rank, self.model = rank, net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.handle = page["register_with"](page["LoopAdapter"], self.model, hook, {})
        self.adapter = self.handle.adapter

    def backward(self, step: int) -> None:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + self.rank))
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()

    def step(self, step: int) -> Tensor:
        self.backward(step)
        self.adapter.average()
        self.optimizer.step()
        return flat(self.model)


def follow(rank: int, size: int, folder: Path) -> dict[str, Any]:
    model = net()
    page: dict[str, Any] = {
        "model": model,
        "batches": [torch.randn(2, 8) for _ in range(3)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    assert run_page("writing-an-adapter.md", folder / str(rank), page) == 2
    assert page["handle"].stats().steps == 3

    found: dict[str, Any] = {"page": [flat(model)]}
    for hook in HOOKS:
        training = Training(rank, page, hook)
        found[hook["name"]] = [training.step(step) for step in range(4)]

    training = Training(rank, page, "allreduce")
    training.backward(0)
    own = torch.cat([p.grad.reshape(-1) for p in training.model.parameters()])  # type: ignore[union-attr]
    training.adapter.average()
    dist.all_reduce(own)
    mean = torch.cat([p.grad.reshape(-1) for p in training.model.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(mean, own / size)

    training = Training(rank, page, "int8")
    reduce = training.handle.hook.reduce

    async def fail(*_: Any) -> Tensor:
        raise ValueError("broken")

    training.step(0)
    training.handle.hook.reduce = fail if rank == 0 else reduce
    with pytest.raises(commhooks.CommHookError, match="broken"):
        training.step(1)
    training.handle.hook.reduce = reduce
    found["after a failure"] = [training.step(step) for step in range(1, 4)]

    other = Training(rank, page, "int8")
    other.handle.load_state_dict(training.handle.state_dict())
    other.model.load_state_dict(training.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    for step in range(4, 7):
        assert torch.equal(training.step(step), other.step(step))

    other.handle.replace("bf16")
    found["replaced"] = [other.step(7)]
    other.handle.remove()
    other.step(8)  # by the plain average
    with pytest.raises(commhooks.CommHookError, match="removed"):
        _ = other.handle.hook
    return found


def test_the_page(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(follow, 2, tmp_path)
    for name, models in first.items():
        for step, (own, peers) in enumerate(zip(models, second[name], strict=True)):
            assert torch.equal(own, peers), (name, step)
