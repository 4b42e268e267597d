"""The points, which are models and links, and the trainings on each rank. Nothing is downloaded.

Batches are small: on one core per rank, a step would otherwise be all computation.
"""

import copy
import functools
import os
import re
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from bench.fidelity.tasks import Batch, Recipe, Text
from bench.models import LARGE
from commhooks.adapters.wrapper import wrap
from commhooks.algorithms.wrappers.table import residual_of
from commhooks.algorithms.wrappers.trial import relative_error, squares_of
from commhooks.cluster.links import ShapedLink, shaped_link
from commhooks.costs.units import format_rate
from commhooks.hook.spec import hook_spec
from commhooks.lab.networks import LSTMLanguageModel, ResNet50
from commhooks.planning import Plan
from examples.gpt import GPTConfig
from examples.stdlib_text import load_corpus

AUTO = "auto"
REFERENCE = "int4"
"""The uniform hook whose error is the limit."""
_NO_RANK = 999
"""Whose data is for the first steps."""


@dataclass(frozen=True)
class Model:
    """A model and its data. Trained with AdamW at first, then with SGD without momentum.

    At the very first, gradients have other norms and ranks than later.
    """

    factory: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """Returns the batch of a step and a rank."""
    rate: float
    """The learning rate of SGD."""
    steps_before: int
    exact: tuple[str, ...] = ("@1d", "@embedding")
    """The option of ``auto``."""

    def make(self) -> nn.Module:
        """Return the model after its first steps, the same one in each process."""
        torch.manual_seed(0)
        module = self.factory()
        batches = (self.batch(step, _NO_RANK) for step in range(self.steps_before))
        for _ in Recipe(torch.optim.AdamW, {"lr": 1e-3}).train(module, batches, lambda _: 1.0):
            pass
        return module


def _words(step: int, rank: int) -> Batch:
    """Return two texts of 10 words of the standard library, by hashes."""
    starts = np.random.default_rng((step, rank)).integers(0, len(_hashes()) - 11, size=2)
    window = _hashes()[torch.from_numpy(starts) + torch.arange(11)[:, None]]
    return window[:-1], window[1:]


def _images(step: int, rank: int) -> Batch:
    """Return two noisy images of 64 x 64 of ten classes."""
    random = torch.Generator().manual_seed(2 * (step * 1000 + rank) + 1)
    labels = torch.randint(10, (2,), generator=random)
    noise = torch.randn(2, 3, 64, 64, generator=random)
    return _patterns()[labels] + noise, labels


@functools.cache
def _hashes() -> Tensor:
    words = re.findall(rb"\w+|[^\w\s]", load_corpus().train[:2_000_000].numpy().tobytes())
    return torch.tensor([zlib.crc32(word) % 28869 for word in words])


@functools.cache
def _patterns() -> Tensor:
    coarse = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return coarse.repeat_interleave(8, 2).repeat_interleave(8, 3)


def _gpt(shape: GPTConfig, steps_before: int) -> Model:
    """Return a GPT that trains on one sequence of bytes of the standard library."""
    data = Text(shape, sequences=1, validation_batches=1)
    return Model(data.model, functools.partial(data.batch, 0), 0.02, steps_before)


MODELS = {
    "gpt": _gpt(LARGE, 100),
    # Its embedding is two thirds of the model and also the output, so its gradient is dense.
    "lstm": Model(LSTMLanguageModel, _words, 0.1, 50, exact=("@1d",)),
    "resnet": Model(ResNet50, _images, 0.002, 50),
    "tiny": _gpt(GPTConfig(layers=1, heads=2, width=32, block_size=16), 1),
}


class Training:
    """A copy of a model that is trained with a hook, by SGD."""

    def __init__(self, kind: Model, module: nn.Module, setting: str) -> None:
        self._kind, self._steps = kind, 0
        exact = {"exact": list(kind.exact)} if setting == AUTO else {}
        self._hook: Any = commhooks.create(hook_spec(setting).config, **exact)
        self._model: Any = wrap(copy.deepcopy(module))
        self._optimizer = torch.optim.SGD(self._model.parameters(), kind.rate)
        self._handle = commhooks.register(self._model, self._hook)
        torch.manual_seed(1 + dist.get_rank())

    def seconds(self, steps: int) -> list[float]:
        """Train some steps, which all ranks begin together. Return the seconds of each."""
        return [self._step() for _ in range(steps)]

    def errors(self, steps: int) -> list[float]:
        """Train some steps. Return the error of the average of each, as ``auto`` measures it."""
        return [self._error() for _ in range(steps)]

    def sent(self) -> tuple[int, float]:
        """Return the number of steps so far, and the bytes that this rank has sent in them."""
        stats = self._handle.stats()
        return stats.steps, stats.steps * (stats.total.wire_bytes or 0.0)

    def learned(self) -> tuple[Plan, list[dict[str, Any]], dict[str, float], float]:
        """Return the plan of ``auto``, its history and metrics, and the seconds of measuring."""
        hook = self._hook
        spent = hook._measuring._spent_ns * 1e-9
        return hook.plan, [vars(each) for each in hook.history], hook.metrics(), spent

    def _step(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self._backward()
        self._optimizer.step()
        self._steps += 1
        return time.perf_counter() - start

    def _backward(self) -> None:
        self._optimizer.zero_grad()
        self._model(*self._kind.batch(self._steps, dist.get_rank())).backward()

    def _error(self) -> float:
        """Train a step. Return |average - exact| / |exact| of all its numbers.

        The exact average is that of gradient plus residual, before the step.
        """
        parameters = dict(self._model.module.named_parameters())
        with self._model.no_sync():
            self._backward()
        exact = {name: self._exact(name, p.grad.clone()) for name, p in parameters.items()}
        self._step()
        squares = [squares_of(p.grad, exact[name]) for name, p in parameters.items()]
        return relative_error(*torch.stack(squares).sum(0).tolist())

    def _exact(self, name: str, gradient: Tensor) -> Tensor:
        size = dist.get_world_size()
        residual = residual_of(self._hook, name, gradient, size)
        if residual is not None:
            gradient += residual.as_strided(gradient.shape, gradient.stride())
        dist.all_reduce(gradient.div_(size))
        return gradient


class Trainings:
    """The trainings of this rank, by their settings."""

    def __init__(self, rank: int, model: str) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun does
        self._kind = MODELS[model]
        self._module = self._kind.make()
        self._trainings: dict[str, Training] = {}

    def add(self, setting: str) -> None:
        """Begin a training."""
        self._trainings[setting] = Training(self._kind, self._module, setting)

    def drop(self, setting: str) -> None:
        """Forget a training."""
        del self._trainings[setting]

    def do(self, setting: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of a training."""
        return method(self._trainings[setting], *arguments)


@dataclass(frozen=True)
class Point:
    """A model on some ranks, with a link each. ``bits_per_second``: 0 for loopback."""

    model: str
    bits_per_second: float
    ranks: int = 2

    @property
    def name(self) -> str:
        """For the command line: ``gpt-100mbit-2``."""
        place = self.place.replace(" ", "").replace("/s", "").lower()
        return f"{self.model}-{place}-{self.ranks}"

    @property
    def place(self) -> str:
        """For tables."""
        return format_rate(self.bits_per_second) if self.bits_per_second else "loopback"

    def link(self) -> AbstractContextManager[ShapedLink | None]:
        """Make the hosts."""
        rate = self.bits_per_second
        return shaped_link(self.ranks, rate) if rate else nullcontext()


POINTS = (
    *(Point(model, rate) for rate in (1e8, 1e9, 1e10) for model in ("gpt", "lstm", "resnet")),
    Point("gpt", 1e8, 4),
    Point("gpt", 1e9, 4),
)
