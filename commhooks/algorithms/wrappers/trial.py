"""Measures the errors of hooks by what they do.

::

    p = gradient + residual
    exact = all_reduce(p) / N
    error = |average - exact| / |exact|      # of the average, which is what training sees

A *trial* lets a hook average a sample of some parameters, whether it is in use or not. A *check*
compares some elements of what a hook returns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.wrappers.table import residual_of
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook, ModelInfo, prepare_all, tree
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.registry import create
from commhooks.precision import at_least_float32
from reducer import GradBucket

Residual = Callable[[str, Tensor, slice], Tensor | None]
"""Returns what is to be added to elements of the gradient of a parameter, as it lies in memory."""


def relative_error(wrong: float, right: float) -> float:
    """Return the quotient of two norms, given their squares; 0 if both are zero."""
    if right == 0:
        return 0.0 if wrong == 0 else math.inf
    return math.sqrt(wrong / right)


def squares_of(average: Tensor, exact: Tensor) -> Tensor:
    """Return the squared norms of ``average - exact`` and of ``exact``.

    A float64 tensor of shape (2,) on their device.
    """
    average, exact = average.view(-1).double(), exact.view(-1).double()
    return torch.stack([(average - exact).square().sum(), exact.square().sum()])


class Trial:
    """A hook of the same options as ``hook``, prepared for the same training, for trials only.

    It has its own errors, which are not those of the training.
    """

    def __init__(
        self,
        hook: CommHook,
        parameters: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        info: ModelInfo,
    ) -> None:
        self._hook = create(hook.to_config())
        prepare_all(self._hook, parameters, group, info)

    def begin(self) -> None:
        """Forget all that the hook has learned, and what it has not sent.

        Call this on all ranks when a step has failed: what is left may differ between ranks.
        """
        self._hook.load_state_dict({})
        self._hook.recover()

    def residual(self, size: int, parameter: str, gradient: Tensor, where: slice) -> Tensor | None:
        """Return what this rank has not sent of a sampled parameter, of ``size`` ranks."""
        return residual_of(self._hook, parameter, gradient, size, where)

    async def average(self, sample: GradBucket, comm: Communicator) -> Tensor:
        """Average a sample, which does not change. All ranks need the same parameters in it."""
        copy = bucket_with(sample, sample.buffer().clone())
        return await self._hook.reduce(copy, comm.within(self._hook, key=sample.key))

    async def measure(self, sample: GradBucket, comm: Communicator) -> Tensor:
        """Return the :func:`squares_of` the average of a hook that has no errors to send.

        What it learns from step to step, such as the factors of PowerSGD, it learns first.
        """
        copy = sample.buffer().to(at_least_float32(sample.buffer().dtype), copy=True)
        exact = await comm.all_reduce(copy.div_(comm.size))
        self.begin()
        found = await self.average(sample, comm)
        for hook in tree(self._hook):  # keep what it has learned: what is the same on all ranks
            kept = dict[str, dict[str, Tensor]]()
            for name, gradient in zip(sample.names, sample.gradients(), strict=True):
                fields = hook.state_fields(gradient) if name in hook.state else ()
                same = {field.name for field in fields or () if field.across_ranks == "same"}
                kept[name] = {n: t for n, t in hook.state.get(name, {}).items() if n in same}
            hook.state = {name: entry for name, entry in kept.items() if entry}
        if any(hook.state for hook in tree(self._hook)):
            found = await self.average(sample, comm)
        return squares_of(found, exact)


class Check:
    """Some elements of a bucket as they are before it is averaged, to be compared with its average.

    About ``elements`` evenly spaced ones of each group, different ones each step. A check of the
    hooks in use sees what many steps have done to their residuals.

    Args:
        groups: The names of parameters, by any key.
    """

    def __init__(
        self,
        bucket: GradBucket,
        groups: Mapping[Any, Sequence[str]],
        residual: Residual,
        elements: int,
    ) -> None:
        lengths = dict(zip(bucket.names, bucket.lengths, strict=True))
        strides = {
            name: (key, max(1, sum(lengths[n] for n in names) // elements) | 1)
            for key, names in groups.items()
            for name in names
        }  # odd: not one column of a matrix
        flat, exact = bucket.buffer(), at_least_float32(bucket.buffer().dtype)
        self._places: list[tuple[Any, slice]] = []  # the key of a group, and some elements
        parts = [flat.new_empty(0, dtype=exact)]
        every = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        for (name, start, length), gradient in zip(every, bucket.gradients(), strict=True):
            if name not in strides:
                continue
            key, stride = strides[name]
            where = slice(bucket.step % stride, length, stride)
            p = flat[start : start + length][where].to(exact, copy=True)
            rest = residual(name, gradient, where)
            parts.append(p if rest is None else p.add_(rest.to(p)))
            self._places.append((key, slice(start + where.start, start + length, stride)))
        self.p = torch.cat(parts)  # this rank's gradient plus residual there

    async def squares(self, average: Tensor, comm: Communicator) -> dict[Any, Tensor]:
        """Return the :func:`squares_of` each group by key, given the ``average`` of the bucket."""
        if not self._places:
            return {}
        exact = await comm.all_reduce(self.p.div_(comm.size))
        flat, found, begin = average.view(-1), dict[Any, Tensor](), 0
        for key, where in self._places:
            part = flat[where]
            squares = squares_of(part, exact[begin : begin + len(part)])
            found[key] = found[key] + squares if key in found else squares
            begin += len(part)
        return found


def draw_sample(
    bucket: GradBucket,
    names: Sequence[str],
    limit: int,
    *,
    residual: Residual = lambda *_: None,
    turn: int = 0,
    index: int = 0,
    is_last: bool = True,
) -> GradBucket:
    """Return gradient plus residual of at most ``limit`` elements of the parameters ``names``.

    Whole parameters, as low-rank hooks need them, beginning with another one in each ``turn``; of
    larger ones, evenly spaced rows, and if these are larger, evenly spaced columns. The dtype is
    that of the bucket, ``index`` and ``is_last`` are those of the sample among all samples of the
    step.
    """
    wanted = set(names)
    positions = [i for i, name in enumerate(bucket.names) if name in wanted]
    start = turn % len(positions)
    gradients = bucket.gradients()
    parts: dict[str, Tensor] = {}
    free = limit
    for i in (*positions[start:], *positions[:start]):
        name, p = bucket.names[i], gradients[i]
        if parts and p.numel() > free:
            break
        if (rest := residual(name, p, slice(None))) is not None:
            p = p + rest.to(p.device).as_strided(p.shape, p.stride())
        if p.dim() > 0 and p.numel() > limit:
            row = p.numel() // len(p)
            p = p[:: math.ceil(len(p) / max(1, limit // row))]
            if row > limit:
                p = p.flatten(1)[:, :: math.ceil(row / limit)]
        parts[name] = p
        free -= p.numel()
    buffer = bucket.buffer()
    like = [torch.empty_like(part, dtype=buffer.dtype) for part in parts.values()]
    flat = buffer.new_empty(sum(part.numel() for part in parts.values()))
    sample = GradBucket(flat, like, list(parts), index=index, is_last=is_last, step=bucket.step)
    for view, part in zip(sample.gradients(), parts.values(), strict=True):
        view.copy_(part)
    return sample
