"""The error of the averages of a hook, as ``auto`` measures it, but of all numbers of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from commhooks.algorithms.adaptive.residuals import residual_of
from commhooks.algorithms.adaptive.trial import relative_error
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from reducer import GradBucket

__all__ = ["Meter"]


class Meter:
    """Compares what a hook returns with the exact average of gradient plus residual.

    Create it before the hook is registered.
    """

    def __init__(self, hook: CommHook) -> None:
        self._hook = hook
        self._reduce = hook.reduce
        self._squares: list[tuple[Tensor, Tensor]] = []
        self.is_on = False
        object.__setattr__(hook, "reduce", self._measured)

    def error(self) -> float:
        """Return the error of all steps since the last call."""
        wrong, right = (sum(map(float, each)) for each in zip(*self._squares, strict=True))
        self._squares.clear()
        return relative_error(wrong, right)

    async def _measured(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        if not self.is_on:
            return await self._reduce(bucket, comm)
        exact = bucket.buffer().clone()
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        for (name, start, length), gradient in zip(places, bucket.gradients(), strict=True):
            residual = residual_of(self._hook, name, gradient, comm.size)
            if residual is not None:
                exact[start : start + length] += residual
        average = await self._reduce(bucket, comm)
        await comm.all_reduce(exact.div_(comm.size))
        wrong = torch.sub(average.view(-1), exact).double().square().sum()
        self._squares.append((wrong, exact.double().square().sum()))
        return average
