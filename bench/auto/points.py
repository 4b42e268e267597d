"""The points: models, the data that they train on, and links. Nothing is downloaded.

Batches are small: on one core per rank, a step would otherwise be all computation.
"""

import functools
import re
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bench import slow_link
from bench.fidelity.tasks import Batch, Text
from commhooks.cluster.links import ShapedLink, shaped_link
from commhooks.costs.units import format_rate
from commhooks.lab.networks import LSTMLanguageModel, ResNet50
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
    """Of a step and a rank."""
    rate: float
    """Of SGD."""
    steps_before: int
    exact: tuple[str, ...] = ("@1d", "@embedding")
    """The option of ``auto``."""

    def make(self) -> nn.Module:
        """Return the model after its first steps, the same one in each process."""
        torch.manual_seed(0)
        module = self.factory()
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
        for step in range(self.steps_before):
            optimizer.zero_grad()
            module(*self.batch(step, _NO_RANK)).backward()
            optimizer.step()
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
    "gpt": _gpt(slow_link.SHAPE, 100),
    # Its embedding is two thirds of the model and also the output, so its gradient is dense.
    "lstm": Model(LSTMLanguageModel, _words, 0.1, 50, exact=("@1d",)),
    "resnet": Model(ResNet50, _images, 0.002, 50),
    "tiny": _gpt(GPTConfig(layers=1, heads=2, width=32, block_size=16), 1),
}


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
