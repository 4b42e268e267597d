"""Measures the error of a hook by what it does: it averages a sample, and so does the exact hook.

::

    p = gradient + residual                  # a sample of some parameters
    exact = all_reduce(p) / N
    error = |hook(p) - exact| / |exact|      # of the average, which is what training sees
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.adaptive.observation import Observation, Observed, observe
from commhooks.algorithms.adaptive.timing import HOST, Times
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook, Role, tree
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare
from commhooks.hook.state import StateField
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["Clock", "ExactAverage", "Outcome", "Trial", "relative_error"]


Clock = Callable[[Observed], float]
"""Returns what a collective took."""


def _no_clock(_: Observed) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class ExactAverage:
    """The exact average of a sample, in float32 or float64, and what it took."""

    value: Tensor
    seen: Observation

    @classmethod
    async def of(
        cls,
        sample: GradBucket,
        comm: Communicator,
        clock: Clock = _no_clock,
        times: Times = HOST,
    ) -> "ExactAverage":
        """Average the sample, which does not change."""
        seen, buffer = Observation(clock, times), sample.buffer()
        copy = buffer.to(at_least_float32(buffer.dtype), copy=True)
        return cls(await observe(_average(copy, comm), seen), seen)

    @property
    def seconds(self) -> float:
        """What it took on this rank, without waiting for other collectives."""
        return self.seen.link_seconds + self.seen.local_seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial has found. The numbers are on the device of the gradients."""

    squares: Tensor
    """(2,) float64: of the norm of the error, and of the norm of the exact average."""
    elements: int
    runs: tuple[Observation, ...]
    exact: Observation

    @property
    def hook(self) -> Observation:
        """What the hook has done in the run that counts."""
        return self.runs[-1]

    @property
    def seconds(self) -> float:
        """What it took on this rank besides the exact average, without waiting for others."""
        return sum(run.link_seconds + run.local_seconds for run in self.runs)

    @property
    def error(self) -> float:
        """|average - exact| / |exact|. Waits for the device."""
        return relative_error(*self.squares.tolist())

    @property
    def norm(self) -> float:
        """|exact|. Waits for the device."""
        return math.sqrt(self.squares[1])


def relative_error(wrong: float, right: float) -> float:
    """Return the quotient of two norms, given their squares; 0 if both are zero."""
    if right == 0:
        return 0.0 if wrong == 0 else math.inf
    return math.sqrt(wrong / right)


class Trial:
    """A hook of the same options as ``hook``, for trials only.

    Each trial begins without errors, which are not those of the training. It keeps what is the same
    on all ranks, such as the factors of PowerSGD: with new random ones, errors would be larger than
    in a training that has gone on for some steps. The first trial of some parameters runs twice for
    that reason.

    What a failed step leaves behind may differ between ranks: :meth:`recover` forgets all of it, or
    ranks would run the hook a different number of times.
    """

    def __init__(self, hook: CommHook) -> None:
        self._hook = create(hook.to_config())

    def prepare(
        self,
        parameters: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        roles: Mapping[str, Role] | None,
    ) -> None:
        """Prepare the hook for the parameters of the training."""
        prepare(self._hook, parameters, group, roles)

    async def run(
        self,
        sample: GradBucket,
        comm: Communicator,
        clock: Clock = _no_clock,
        exact: ExactAverage | None = None,
        times: Times = HOST,
        *,
        twice: bool = False,
    ) -> Outcome:
        """Average a sample, which does not change. All ranks need the same parameters in it.

        Several trials on a sample can share its exact average. The first run of a hook takes longer
        than the usual time, so with ``twice`` the second one counts.
        """
        exact = exact or await ExactAverage.of(sample, comm, clock, times)
        self._forget_errors(sample)  # of former trials that have failed, or had other shapes
        runs = 2 if twice or self._learns(sample) else 1
        seen = tuple(Observation(clock, times) for _ in range(runs))
        for each in seen:
            copy = bucket_with(sample, sample.buffer().clone())
            average = await self._reduce(copy, comm, each)
            self._forget_errors(sample)
        flat = average.view(-1).to(exact.value.dtype)
        wrong = (flat - exact.value).square().sum(dtype=torch.float64)
        right = exact.value.square().sum(dtype=torch.float64)
        return Outcome(torch.stack([wrong, right]), exact.value.numel(), seen, exact.seen)

    def recover(self) -> None:
        """Begin without state, because a step has failed on some rank."""
        self._hook.load_state_dict({})
        self._hook.recover()

    async def _reduce(self, sample: GradBucket, comm: Communicator, seen: Observation) -> Tensor:
        nested = comm.within(self._hook, key=sample.key)
        average: Tensor = await observe(self._hook.reduce(sample, nested), seen)
        return average

    def _forget_errors(self, sample: GradBucket) -> None:
        """Keep only what is the same on all ranks, of the parameters of this sample."""
        gradients = dict(zip(sample.names, sample.gradients(), strict=True))
        for hook in tree(self._hook):
            kept = {}
            for name, entry in hook.state.items():
                same = _same(hook, gradients.get(name))
                fitting = {f: v for f, v in entry.items() if f in same and v.shape == same[f]}
                if fitting:
                    kept[name] = fitting
            hook.state = kept

    def _learns(self, sample: GradBucket) -> bool:
        """Return whether the hook has to learn something of the sample that it does not know."""
        pairs = zip(sample.names, sample.gradients(), strict=True)
        return any(
            _same(hook, gradient) and name not in hook.state
            for name, gradient in pairs
            for hook in tree(self._hook)
        )


def _same(hook: CommHook, gradient: Tensor | None) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of the fields that are the same on all ranks."""
    if gradient is None:
        return {}
    fields: Sequence[StateField] = hook.state_fields(gradient) or ()
    return {field.name: field.shape for field in fields if field.across_ranks == "same"}


async def _average(values: Tensor, comm: Communicator) -> Tensor:
    return await comm.all_reduce(values.div_(comm.size))
