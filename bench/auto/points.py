"""Where ``auto`` is measured, and for how long."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from commhooks.algorithms.adaptive.candidates import DEFAULT_CANDIDATES
from commhooks.cluster.links import ShapedLink, shaped_link
from commhooks.lab.units import format_rate

__all__ = ["POINTS", "QUICK", "Effort", "Point"]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    """Of ``auto``."""
    settings: tuple[str, ...] = DEFAULT_CANDIDATES
    """The uniform settings that it is compared with."""
    warm_up: int = 120
    """Steps of ``auto`` before it is timed. The first plan is in use after about 7, with one trial
    of each hook."""
    blocks: int = 5
    """Of each setting, in turn."""
    block_steps: int = 6
    """At least 3, or most steps of ``auto`` follow a pause, during which it believes to train. The
    models of the other settings are in the caches at first, so messages seem slower."""
    error_steps: int = 4
    error_after: int = 15
    """Steps before the error of a uniform setting is measured."""


@dataclass(frozen=True)
class Point:
    """A model on some ranks, with a link each. ``bits_per_second``: 0 for loopback."""

    model: str
    bits_per_second: float
    ranks: int = 2

    @property
    def name(self) -> str:
        """For the command line: ``gpt-100mbit-2``."""
        rate = self.bits_per_second
        unit, scale = ("gbit", 1e9) if rate >= 1e9 else ("mbit", 1e6)
        return f"{self.model}-{f'{rate / scale:g}{unit}' if rate else 'loopback'}-{self.ranks}"

    @property
    def place(self) -> str:
        """For tables."""
        return format_rate(self.bits_per_second) if self.bits_per_second else "loopback"

    def link(self) -> AbstractContextManager[ShapedLink | None]:
        """Make the hosts."""
        if not self.bits_per_second:
            return nullcontext()
        return shaped_link(self.ranks, self.bits_per_second)


POINTS = (
    *(Point(model, rate) for rate in (1e8, 1e9, 1e10) for model in ("gpt", "lstm", "resnet")),
    Point("gpt", 1e8, 4),
    Point("gpt", 1e9, 4),
)
QUICK = Effort(
    candidates=("allreduce", "bf16", "int4"),
    settings=("allreduce", "bf16", "int4"),
    warm_up=12,
    blocks=2,
    error_steps=1,
    error_after=1,
)
"""For a test: shows that it works, and nothing else."""
