"""Small tasks on which plain averaging hardly depends on the seed.

A loss of 2 % is only visible if different seeds differ by less. Therefore all tasks end with a
learning rate of zero (see training.py), validate on thousands of examples, and never see the same
example twice, so that training does not end at a loss of zero.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples.gpt import GPT, GPTConfig
from examples.stdlib_text import Corpus, load_corpus, train_batch, validation_batches

Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Recipe:
    """An optimizer, its options, and the norm to which the hook's results are clipped.

    ``for_matrices``: the options of :class:`torch.optim.Muon`, which then trains the matrices of
    linear layers, and the optimizer all other parameters.
    """

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    max_norm: float = math.inf
    for_matrices: Mapping[str, Any] | None = None

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Create the optimizers of a model."""
        if self.for_matrices is None:
            return [self.kind(model.parameters(), **self.options)]
        layers = (module for module in model.modules() if isinstance(module, nn.Linear))
        matrices = [layer.weight for layer in layers]
        others = {*model.parameters()}.difference(matrices)
        rest = [parameter for parameter in model.parameters() if parameter in others]
        return [torch.optim.Muon(matrices, **self.for_matrices), self.kind(rest, **self.options)]


class Task(ABC):
    """A model, its data, and how it is trained."""

    summary: ClassVar[str]
    steps: ClassVar[int]
    usual: ClassVar[str]
    """The recipe of all hooks that do not need another one."""
    recipes: ClassVar[Mapping[str, Recipe]]

    @abstractmethod
    def model(self) -> nn.Module:
        """Create the model, with parameters from torch's generator."""

    @abstractmethod
    def batch(self, seed: int, step: int, rank: int) -> Batch:
        """Return a rank's batch of a step, the same for every hook."""

    @abstractmethod
    def validation(self, rank: int, size: int) -> Batch:
        """Return this rank's share of the validation data."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats."""


def _sgd(**options: float) -> Recipe:
    return Recipe(torch.optim.SGD, options)


def _adamw(lr: float) -> Recipe:
    options = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return Recipe(torch.optim.AdamW, options, max_norm=1.0)


class Classification(Task):
    """Inputs and their labels."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return cross_entropy(model(images), labels)


class Digits(Classification):
    """A convolutional network of 38,000 parameters on scikit-learn's digits, 8 by 8 pixels.

    Noise of half the range of a pixel is added, new noise each time that a digit is used. Every
    second digit is for validation, ten times, with noise that is the same in all runs.
    """

    summary = "a convolutional network of 38,000 parameters, 500 steps of SGD with momentum"
    steps = 500
    usual = "SGD with momentum"
    recipes: ClassVar = {
        "SGD with momentum": _sgd(lr=0.1, momentum=0.9, weight_decay=1e-3),
        # Without momentum, weight decay is ten times weaker; see docs/hooks/dgc.md.
        "SGD without momentum": _sgd(lr=0.1, weight_decay=1e-2),
        "SGD without momentum, 10 times the rate": _sgd(lr=1.0, weight_decay=1e-3),
    }
    _BATCH = 16  # per rank
    _NOISE = 0.5

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        labels = torch.tensor(digits.target)
        self._train = images[::2], labels[::2]
        generator = torch.Generator().manual_seed(0)
        held_out = images[1::2].repeat(10, 1, 1, 1)
        noise = torch.randn(held_out.shape, generator=generator)
        self._validation = held_out + self._NOISE * noise, labels[1::2].repeat(10)

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

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        images, labels = self._train
        generator = torch.Generator().manual_seed((seed * self.steps + step) * 1024 + rank)
        chosen = torch.randint(len(labels), (self._BATCH,), generator=generator)
        noise = torch.randn(images[chosen].shape, generator=generator)
        return images[chosen] + self._NOISE * noise, labels[chosen]

    def validation(self, rank: int, size: int) -> Batch:
        images, labels = self._validation
        return images[rank::size], labels[rank::size]


class Bytes(Task):
    """The demo's byte-level GPT with 120,000 parameters, on Python's standard library."""

    summary = "a GPT of 120,000 parameters, 350 steps of AdamW"
    steps = 350
    usual = "AdamW"
    recipes: ClassVar = {
        "AdamW": _adamw(lr=6e-3),
        "SGD with momentum": _sgd(lr=0.1, momentum=0.9),
        "SGD without momentum": _sgd(lr=0.1),
        "SGD without momentum, 10 times the rate": _sgd(lr=1.0),
    }
    _SHAPE = GPTConfig(layers=2, width=64, heads=4, block_size=64)
    _BATCH = 8  # sequences per rank
    _VALIDATION_BATCHES = 16  # of 32 sequences

    def __init__(self) -> None:
        self._corpus = _corpus()

    def model(self) -> nn.Module:
        return GPT(self._SHAPE)

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        text, length = self._corpus.train, self._SHAPE.block_size
        return train_batch(text, self._BATCH, length, seed=seed, step=step, rank=rank)

    def validation(self, rank: int, size: int) -> Batch:
        text, length = self._corpus.validation, self._SHAPE.block_size
        batches = validation_batches(
            text, 32, length, self._VALIDATION_BATCHES, rank=rank, world_size=size
        )
        inputs, targets = zip(*batches, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        return loss


class LargerGPT(Bytes):
    """The demo's byte-level GPT with 1.03 million parameters, on Python's standard library."""

    summary = "a GPT of 1.03 million parameters, 1,000 steps of AdamW"
    steps = 1000
    recipes: ClassVar = {
        **Bytes.recipes,
        "AdamW": _adamw(lr=4e-3),
        "Muon": replace(
            _adamw(lr=4e-3),
            for_matrices={"lr": 4e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"},
        ),
        # The numbers of the result of demo with signs are -1, 0 and 1, so there is no clipping.
        "SGD for signs": _sgd(lr=2e-3, weight_decay=0.1),
    }
    _SHAPE = GPTConfig(layers=5, width=128, heads=4, block_size=64)
    _BATCH = 4
    _VALIDATION_BATCHES = 32


class _ManySteps:
    """More, smaller steps: 266 periods of diloco. The rate of the optimizer can be chosen."""

    steps = 8000
    recipes: ClassVar = {
        f"AdamW, rate {lr}": _adamw(lr) for lr in (0.001, 0.002, 0.004, 0.008, 0.016)
    }
    _BATCH = 2


class BytesInManySteps(_ManySteps, Bytes):
    """The GPT of ``bytes``."""

    summary = "a GPT of 120,000 parameters, 8,000 steps of AdamW"
    usual = "AdamW, rate 0.008"


class LargerGPTInManySteps(_ManySteps, LargerGPT):
    """The GPT of ``gpt``."""

    summary = "a GPT of 1.03 million parameters, 8,000 steps of AdamW"
    usual = "AdamW, rate 0.004"


@functools.cache
def _corpus() -> Corpus:
    return load_corpus()  # once for all runs of a process


class Clusters(Classification):
    """A perceptron of 51,000 parameters on 40 overlapping clusters of points in 64 dimensions.

    Each of the 10 classes has four clusters. Points are drawn anew in each step.
    """

    summary = "a perceptron of 51,000 parameters on 10 classes, 500 steps of AdamW"
    steps = 500
    usual = "AdamW"
    recipes: ClassVar = {
        "AdamW": Recipe(torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 1e-2}),
        "SGD with momentum": _sgd(lr=0.1, momentum=0.9),
        "SGD without momentum": _sgd(lr=0.1),
        "SGD without momentum, 10 times the rate": _sgd(lr=1.0),
    }
    _BATCH = 32  # per rank
    _CLASSES = 10
    _DIMENSIONS = 64
    _DISTANCE = 0.5  # of a center from the origin, in each dimension; points are 1 from it

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._centers = torch.randn(4 * self._CLASSES, self._DIMENSIONS, generator=generator)
        self._validation = self._draw(8192, generator)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self._DIMENSIONS, 160),
            nn.ReLU(),
            nn.Linear(160, 160),
            nn.ReLU(),
            nn.Linear(160, 80),
            nn.ReLU(),
            nn.Linear(80, self._CLASSES),
        )

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        drawn = (seed * self.steps + step) * 1024 + rank
        return self._draw(self._BATCH, torch.Generator().manual_seed(1 + drawn))

    def validation(self, rank: int, size: int) -> Batch:
        points, labels = self._validation
        return points[rank::size], labels[rank::size]

    def _draw(self, count: int, generator: torch.Generator) -> Batch:
        clusters = torch.randint(len(self._centers), (count,), generator=generator)
        noise = torch.randn(count, self._DIMENSIONS, generator=generator)
        return self._DISTANCE * self._centers[clusters] + noise, clusters % self._CLASSES


TASKS: Mapping[str, type[Task]] = {"digits": Digits, "bytes": Bytes, "gpt": LargerGPT}
"""The tasks that all hooks are trained on, and whose figures are published."""
ALL_TASKS: Mapping[str, type[Task]] = {
    **TASKS,
    "clusters": Clusters,
    "bytes-8000": BytesInManySteps,
    "gpt-8000": LargerGPTInManySteps,
}
"""These, and those on which options are tried."""
