"""Measures the errors of hooks by what they do.

::

    p = gradient + residual
    exact = all_reduce(p) / N
    error = |average - exact| / |exact|      # of the average, which is what training sees

A *trial* lets a hook average a sample of some parameters, whether it is in use or not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.wrappers.timing import HOST, Clock, Run, observe
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook, tree
from commhooks.hook.capabilities import Role
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare
from commhooks.hook.state import StateField
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = [
    "ExactAverage",
    "Outcome",
    "Residual",
    "Trial",
    "average_exactly",
    "draw_sample",
    "relative_error",
]

Residual = Callable[[str, Tensor, slice], Tensor | None]
"""Returns what is to be added to elements of the gradient of a parameter, as it lies in memory."""


def relative_error(wrong: float, right: float) -> float:
    """Return the quotient of two norms, given their squares; 0 if both are zero."""
    if right == 0:
        return 0.0 if wrong == 0 else math.inf
    return math.sqrt(wrong / right)


@dataclass(frozen=True, slots=True)
class ExactAverage:
    """The exact average of a sample, in float32 or float64, and what it took."""

    value: Tensor
    run: Run

    @classmethod
    async def of(
        cls, sample: GradBucket, comm: Communicator, clock: Clock = HOST
    ) -> "ExactAverage":
        """Average the sample, which does not change."""
        run, buffer = Run(clock), sample.buffer()
        copy = buffer.to(at_least_float32(buffer.dtype), copy=True)
        return cls(await observe(average_exactly(copy, comm), run), run)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial has found. The numbers are on the device of the gradients."""

    squares: Tensor
    """(2,) float64: of the norm of the error, and of the norm of the exact average."""
    elements: int
    run: Run
    """What the hook has done in the run that counts."""
    exact: Run

    @property
    def error(self) -> float:
        """|average - exact| / |exact|. Waits for the device."""
        return relative_error(*self.squares.tolist())

    @property
    def norm(self) -> float:
        """|exact|. Waits for the device."""
        return math.sqrt(self.squares[1])


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
        exact: ExactAverage | None = None,
        clock: Clock = HOST,
        *,
        twice: bool = False,
    ) -> Outcome:
        """Average a sample, which does not change. All ranks need the same parameters in it.

        Several trials on a sample can share its exact average. The first run of a hook takes longer
        than the usual time, so with ``twice`` the second one counts.
        """
        exact = exact or await ExactAverage.of(sample, comm, clock)
        self._forget_errors(sample)  # of former trials that have failed, or had other shapes
        for _ in range(2 if twice or self._learns(sample) else 1):
            run = Run(clock)
            copy = bucket_with(sample, sample.buffer().clone())
            nested = comm.within(self._hook, key=sample.key)
            found: Tensor = await observe(self._hook.reduce(copy, nested), run)
            self._forget_errors(sample)
        flat = found.view(-1).to(exact.value.dtype)
        wrong = (flat - exact.value).square().sum(dtype=torch.float64)
        right = exact.value.square().sum(dtype=torch.float64)
        return Outcome(torch.stack([wrong, right]), exact.value.numel(), run, exact.run)

    def recover(self) -> None:
        """Begin without state, because a step has failed on some rank."""
        self._hook.load_state_dict({})
        self._hook.recover()

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


def draw_sample(
    bucket: GradBucket, names: Sequence[str], residual: Residual, limit: int, turn: int = 0
) -> GradBucket:
    """Return gradient plus residual of about ``limit`` elements of the parameters ``names``.

    Whole parameters, as low-rank hooks need them, beginning with another one in each ``turn``; of
    larger ones, evenly spaced rows. The dtype is that of the bucket.
    """
    wanted = set(names)
    positions = [i for i, name in enumerate(bucket.names) if name in wanted]
    start = turn % len(positions)
    gradients = bucket.gradients()
    parts: dict[str, Tensor] = {}
    free = limit
    for i in (*positions[start:], *positions[:start]):
        name, gradient = bucket.names[i], gradients[i]
        if parts and gradient.numel() > free:
            break
        rest = residual(name, gradient, slice(None))
        if rest is None:
            p = gradient
        else:
            p = gradient + rest.to(gradient.device).as_strided(gradient.shape, gradient.stride())
        if p.dim() > 0 and p.numel() > limit:
            p = p[:: math.ceil(p.numel() / limit)]
        parts[name] = p
        free -= p.numel()
    buffer = bucket.buffer()
    like = [torch.empty_like(part, dtype=buffer.dtype) for part in parts.values()]
    flat = buffer.new_empty(sum(part.numel() for part in parts.values()))
    sample = GradBucket(flat, like, list(parts), step=bucket.step)
    for view, part in zip(sample.gradients(), parts.values(), strict=True):
        view.copy_(part)
    return sample


def _same(hook: CommHook, gradient: Tensor | None) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of the fields that are the same on all ranks."""
    if gradient is None:
        return {}
    fields: Sequence[StateField] = hook.state_fields(gradient) or ()
    return {field.name: field.shape for field in fields if field.across_ranks == "same"}


async def average_exactly(values: Tensor, comm: Communicator) -> Tensor:
    """Return the exact average of ``values``, which are overwritten."""
    return await comm.all_reduce(values.div_(comm.size))
