"""Does it still learn? ``python -m bench.fidelity --task digits --json digits.json``

Every hook at its default options, against plain averaging, with the same data, number of steps and
seeds, on 4 ranks. The figure is the loss on validation data after the last step, of each rank's own
model, averaged over ranks (they differ for hooks without consensus).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import commhooks
from commhooks.testing import close_ranks, run_ranks

RANKS = 4
BATCH = 16  # per rank

# Hooks that need others to do something, in their most common form.
CONFIGS: dict[str, dict[str, Any]] = {
    "cast": {"inner": "allreduce", "dtype": "bfloat16"},
    "error_feedback": {"inner": {"name": "topk", "error_feedback": False}},
    "hierarchical": {"inner": "int8", "ranks_per_node": 2},
    "route": {"rules": [["*bias", "allreduce"]], "default": "powersgd"},
    "schedule": {"stages": [[0, "allreduce"], [50, "int4"]]},
    "skip_nonfinite": {"inner": "bf16"},
}
NOT_TRAINED = {"noop"}  # sends nothing
_BLOCK = 64  # bytes that the language model sees


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one run, on one rank. ``wire_bytes``: sent by it in all steps. NaN accuracy: none."""

    loss: float
    accuracy: float
    wire_bytes: float
    seconds: float


class Digits:
    """A small convolutional network on scikit-learn's handwritten digits, 8 by 8; every fifth
    digit is for validation. SGD with momentum; without for DGC, which has its own.
    """

    steps = 300

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        labels = torch.tensor(digits.target)
        held_out = torch.arange(len(labels)) % 5 == 0
        self._train = images[~held_out], labels[~held_out]
        self._validation = images[held_out], labels[held_out]

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def optimizer(self, model: nn.Module, hook: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.0 if hook == "dgc" else 0.9)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, labels = self._train
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        return images[chosen], labels[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(model(images), labels)

    def validate(self, model: nn.Module) -> tuple[float, float]:
        images, labels = self._validation
        right = model(images).argmax(-1) == labels
        return self.loss(model, self._validation).item(), right.float().mean().item()


class Bytes:
    """The byte-level GPT of the demo, on the source of Python's standard library. AdamW."""

    steps = 300

    def __init__(self) -> None:
        from examples.stdlib_text import load_corpus

        self._corpus = load_corpus()

    def model(self) -> nn.Module:
        from examples.gpt import GPT, GPTConfig

        return GPT(GPTConfig(layers=2, width=96, heads=4, block_size=_BLOCK))

    def optimizer(self, model: nn.Module, hook: str) -> torch.optim.Optimizer:
        if hook == "dgc":
            return torch.optim.SGD(model.parameters(), 0.1)
        return torch.optim.AdamW(model.parameters(), 1e-3)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = self._corpus.train
        starts = torch.randint(len(text) - _BLOCK - 1, (BATCH,), generator=generator)
        windows = torch.stack([text[start : start + _BLOCK + 1] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    def validate(self, model: nn.Module) -> tuple[float, float]:
        windows = self._corpus.validation[: 64 * (_BLOCK + 1)].long().view(64, -1)
        return self.loss(model, (windows[:, :-1], windows[:, 1:])).item(), math.nan


TASKS: dict[str, Any] = {"digits": Digits, "bytes": Bytes}


def train(rank: int, size: int, task: str, hook: str, seed: int, steps: int) -> Outcome:
    """One run on one rank."""
    data = TASKS[task]()
    torch.manual_seed(seed)
    model = commhooks.DistributedDataParallel(data.model())
    handle = commhooks.register(model, hook, **CONFIGS.get(hook, {}))
    optimizer = data.optimizer(model, hook)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        data.loss(model, data.batch(generator)).backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    sent = handle.stats().total.wire_bytes or 0.0
    with torch.no_grad():
        loss, accuracy = data.validate(model.module.eval())
    return Outcome(loss, accuracy, float(sent) * steps, seconds)


def main() -> None:
    """Prints a line per hook and writes all runs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--hooks", help="comma-separated; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    steps = arguments.steps or TASKS[arguments.task].steps
    others = sorted(set(commhooks.available()) - NOT_TRAINED - {"allreduce"})
    hooks = ["allreduce", *(arguments.hooks.split(",") if arguments.hooks else others)]
    rows: list[dict[str, Any]] = []
    print("| hook | validation loss | spread over seeds | to plain | accuracy | bytes | to plain |")
    print("|---|---|---|---|---|---|---|")
    for hook in hooks:
        losses, accuracies, sent = [], [], []
        for seed in range(arguments.seeds):
            outcomes = run_ranks(train, RANKS, arguments.task, hook, seed, steps, timeout=600.0)
            losses.append(statistics.mean(o.loss for o in outcomes))
            accuracies.append(statistics.mean(o.accuracy for o in outcomes))
            sent.append(statistics.mean(o.wire_bytes for o in outcomes))
            rows += [
                {"hook": hook, "seed": seed, "rank": rank, **dataclasses.asdict(outcome)}
                for rank, outcome in enumerate(outcomes)
            ]
        mean = statistics.mean(losses)
        spread = max(losses) - min(losses)
        if hook == "allreduce":
            plain_loss, plain_bytes = mean, statistics.mean(sent)
        print(
            f"| {hook} | {mean:.4f} | {spread:.4f} | {mean / plain_loss - 1:+.1%} | "
            f"{statistics.mean(accuracies):.3f} | {statistics.mean(sent):,.0f} | "
            f"{statistics.mean(sent) / plain_bytes:.4f} |",
            flush=True,
        )
    if arguments.json:
        about = {"task": arguments.task, "ranks": RANKS, "steps": steps, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**about, "runs": rows}, indent=1))
    close_ranks()


if __name__ == "__main__":
    main()
