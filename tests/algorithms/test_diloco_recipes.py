"""The recipes in docs/hooks/diloco.md: they train, and send the bytes that the page states."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks

ROOT = Path(__file__).parents[2]
N = 2
ELEMENTS = 3 * 64 * 64 + 4096  # whole blocks and chunks in every message
FRAGMENTS = 2


def message(elements: int, bits: int, block: int) -> int:
    """The bytes of a quantized message of whole blocks: docs/hooks/quantized.md."""
    return 4 * elements // block + elements * bits // 8


START = 2 * (N - 1) * 4 * ELEMENTS // N  # the first mean


def two_shot(bits: int, block: int) -> int:
    return 2 * (N - 1) * message(ELEMENTS // N, bits, block)


TOPK = {"name": "topk", "chunk": 4096, "density": 1 / 64, "bits": 2, "warmup_steps": 0}
SPARSE = {"name": "error_feedback", "decay": 0.95, "inner": {**TOPK, "error_feedback": False}}
E3M0 = {"name": "fp4", "format": "e3m0", "error_feedback": False}
STREAMING = {"delay": 5, "merge": 0.5, "outer_lr": 0.4, "fragments": FRAGMENTS}
RECIPES: dict[str, tuple[dict[str, Any], int]] = {
    "DiLoCo": ({"period": 500}, 2 * (N - 1) * 4 * ELEMENTS // N),
    "INTELLECT-1": ({"period": 100, "inner": "int8"}, two_shot(8, 256)),
    "Streaming DiLoCo": ({"period": 100, "inner": E3M0, **STREAMING}, two_shot(4, 1024)),
    "MuLoCo": ({"period": 30, "inner": "int2"}, two_shot(2, 64)),
    # Per chunk a bitmap of 64 bits; 64 indices with one more bit in it and 6 others; 64 values of 2
    # bits; and a scale.
    "SparseLoCo": (
        {"period": 30, "outer_lr": 1.0, "outer_momentum": 0.0, "inner": SPARSE},
        (N - 1) * ELEMENTS // 4096 * (64 * (1 + 1 + 6 + 2) // 8 + 4),
    ),
}


class Net(nn.Module):
    """Matrices, which Muon trains, and one vector, which it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(4096))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + layer(inputs).tanh()
        return (inputs.repeat(1, 64) * self.scale).mean(1)


def optimizers_of(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if name != "MuLoCo":
        return [torch.optim.AdamW(parameters, lr=1e-3)]
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    vectors = [parameter for parameter in parameters if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=1e-3)]


def train(rank: int, size: int, names: list[str]) -> dict[str, tuple[float, float, float]]:
    """Train for half a period, in which all is sent once; return bytes and losses."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        options: dict[str, Any] = RECIPES[name][0]
        model = commhooks.DistributedDataParallel(Net(), stable_buckets=True, bucket_cap_mb=25)
        handle = commhooks.register(model, "diloco", start_step=1, **options)
        first = options["period"] // 2
        model.reducer.steps = first - 9
        optimizers = optimizers_of(name, model)
        inputs = torch.randn(64, 64)
        torch.manual_seed(rank)
        steps = options["period"] - first + 12
        losses = []
        for _ in range(steps):
            chosen = torch.randint(64, (16,))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (model(inputs[chosen]) - 1).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        handle.adapter.drain()
        sent = handle.stats().total.wire_bytes
        assert sent is not None
        found[name] = (sent * steps, sum(losses[:5]), sum(losses[-5:]))
    return found


def test_recipes_train_and_send_what_the_page_says(run_ranks: Any) -> None:
    for of_rank in run_ranks(train, N, list(RECIPES), timeout=300):
        for name, (sent, first, last) in of_rank.items():
            assert last < first, name
            assert round(sent) == START + RECIPES[name][1], name


def test_the_page_has_these_figures() -> None:
    page = (ROOT / "docs" / "hooks" / "diloco.md").read_text()
    for name, (options, sent) in RECIPES.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| [{name}]")]
        bytes_, saving = re.search(r"\| ([\d.]+)·.* (\d+) times", row).groups()  # type: ignore[union-attr]
        is_gathered = name == "SparseLoCo"  # from all ranks; others send a share of an average
        per_element = sent / ELEMENTS / (N - 1 if is_gathered else (N - 1) / N)
        assert float(bytes_) == pytest.approx(per_element, rel=0.005)
        of_eight = per_element * (7 if is_gathered else 7 / 8)
        assert int(saving) == round(options["period"] * 8 * 7 / 8 / of_eight)
