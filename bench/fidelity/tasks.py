"""Small tasks on which plain averaging hardly depends on the seed.

A loss of 2 % is only visible if different seeds differ by less. Therefore all tasks end with a
learning rate of zero (see training.py), validate on thousands of examples, and never see the same
example twice, so that training does not end at a loss of zero.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

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

    def train(
        self, model: nn.Module, batches: Iterable[Batch], rate: Callable[[int], float]
    ) -> Iterator[None]:
        """Train on each batch, with ``rate(step)`` of the learning rate. Yield after each step."""
        optimizers = self.optimizers(model)
        schedules = [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]
        for batch in batches:
            model.zero_grad()
            model(*batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            yield


class Classifier(nn.Sequential):
    """Maps inputs and labels to the mean cross-entropy in nats."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return cross_entropy(super().forward(inputs), labels)


class Digits:
    """A convolutional network on scikit-learn's digits, 8 by 8 pixels.

    Noise of half the range of a pixel is added, new noise each time that a digit is used. Every
    second digit is for validation, ten times, with noise that is the same in all runs.
    """

    STEPS = 500
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
        return Classifier(
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
        generator = torch.Generator().manual_seed((seed * self.STEPS + step) * 1024 + rank)
        chosen = torch.randint(len(labels), (self._BATCH,), generator=generator)
        noise = torch.randn(images[chosen].shape, generator=generator)
        return images[chosen] + self._NOISE * noise, labels[chosen]

    def validation(self, rank: int, size: int) -> Batch:
        images, labels = self._validation
        return images[rank::size], labels[rank::size]


_corpus = functools.cache(load_corpus)  # once for all runs of a process


@dataclass(frozen=True)
class Text:
    """The demo's byte-level GPT, on Python's standard library.

    ``sequences``: per rank and step. ``validation_batches``: of 8 sequences, one or more per rank.
    ``dtype``: of the parameters and of all computations.
    """

    shape: GPTConfig
    sequences: int
    validation_batches: int
    corpus: Callable[[], Corpus] = _corpus
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        return GPT(self.shape).to(self.dtype)

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        text, length = self.corpus().train, self.shape.block_size
        return train_batch(text, self.sequences, length, seed=seed, step=step, rank=rank)

    def validation(self, rank: int, size: int) -> Batch:
        text, length = self.corpus().validation, self.shape.block_size
        batches = validation_batches(
            text, 8, length, self.validation_batches, rank=rank, world_size=size
        )
        inputs, targets = zip(*batches, strict=True)
        return torch.cat(inputs), torch.cat(targets)


@dataclass(frozen=True)
class Task:
    """A model and its data, and how it is trained.

    ``usual``: the recipe of all hooks that do not need another one. What ``make_data`` returns
    creates the model with parameters from torch's generator, the same batches for every hook, and
    the share of a rank in the validation data. ``stride``: steps between validations; None for a
    single one, at the end.
    """

    summary: str
    steps: int
    usual: str
    recipes: Mapping[str, Recipe]
    make_data: Callable[..., Digits | Text]
    stride: int | None = None


def _sgd(**options: float) -> Recipe:
    return Recipe(torch.optim.SGD, options)


def adamw(**options: Any) -> Recipe:
    """Return the demo's recipe."""
    usual = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    return Recipe(torch.optim.AdamW, usual | options, max_norm=1.0)


_FOR_TEXT = {
    "AdamW": adamw(lr=6e-3),
    "SGD with momentum": _sgd(lr=0.1, momentum=0.9),
    "SGD without momentum": _sgd(lr=0.1),
    "SGD without momentum, 10 times the rate": _sgd(lr=1.0),
    **{f"AdamW, rate {lr}": adamw(lr=lr) for lr in (0.001, 0.002, 0.004, 0.008, 0.016)},
}
_RATES = (0.0005, 0.001, 0.0015, 0.002, 0.004)
_MUON = {"lr": 4e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
_SMALL = GPTConfig(layers=2, width=64, heads=4, block_size=64)
_LARGE = GPTConfig(layers=5, width=128, heads=4, block_size=64)
_LARGEST = GPTConfig(layers=4, width=256, heads=4, block_size=64)

TASKS = {
    "digits": Task(
        "a convolutional network of 38,000 parameters, 500 steps of SGD with momentum",
        Digits.STEPS,
        "SGD with momentum",
        {
            "SGD with momentum": _sgd(lr=0.1, momentum=0.9, weight_decay=1e-3),
            # Without momentum, weight decay is ten times weaker; see docs/hooks/dgc.md.
            "SGD without momentum": _sgd(lr=0.1, weight_decay=1e-2),
            "SGD without momentum, 10 times the rate": _sgd(lr=1.0, weight_decay=1e-3),
        },
        Digits,
    ),
    "bytes": Task(
        "a GPT of 120,000 parameters, 350 steps of AdamW",
        350,
        "AdamW",
        _FOR_TEXT,
        functools.partial(Text, shape=_SMALL, sequences=8, validation_batches=64),
    ),
    "gpt": Task(
        "a GPT of 1.03 million parameters, 1,000 steps of AdamW",
        1000,
        "AdamW",
        {
            **_FOR_TEXT,
            "AdamW": adamw(lr=4e-3),
            "Muon": replace(adamw(lr=4e-3), for_matrices=_MUON),
            # The numbers of the result of demo with signs are -1, 0 and 1: there is no clipping.
            "SGD for signs": _sgd(lr=2e-3, weight_decay=0.1),
        },
        functools.partial(Text, shape=_LARGE, sequences=4, validation_batches=128),
    ),
}
"""The tasks that all hooks are trained on, and whose figures are published."""
LANGUAGE = Task(
    "a GPT of 3.24 million parameters, 1,500 steps of AdamW",
    1500,
    "AdamW, rate 0.001",
    {f"AdamW, rate {lr}": adamw(lr=lr, fused=True) for lr in _RATES},
    functools.partial(Text, shape=_LARGEST, sequences=2, validation_batches=64),
    stride=60,  # two periods of diloco
)
"""The task of the headline, with a loss over steps. In its small batches, a rank alone learns less.
"""
ALL_TASKS = TASKS | {
    "language": LANGUAGE,
    "language-bf16": replace(
        LANGUAGE,
        summary="the language task with parameters, gradients and optimizer states in bfloat16",
        make_data=functools.partial(LANGUAGE.make_data, dtype=torch.bfloat16),
    ),
    **{
        f"{name}-8000": replace(
            TASKS[name],
            summary=f"{TASKS[name].summary.partition(',')[0]}, 8,000 steps of AdamW",
            steps=8000,
            usual=f"AdamW, rate {rate}",
            make_data=functools.partial(TASKS[name].make_data, sequences=2),
        )
        for name, rate in {"bytes": 0.008, "gpt": 0.004}.items()
    },
}
"""These, the headline's, and those on which options are tried, of smaller steps."""
