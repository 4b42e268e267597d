"""Compares what hooks in use return with exact averages, at evenly spaced elements.

Unlike a trial, a check sees what many steps have done to the residual, and all layers of a group.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.algorithms.adaptive.groups import ParameterGroup
from commhooks.algorithms.wrappers.trial import Residual, average_exactly
from commhooks.comm.communicator import Communicator
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["Check"]

_CHECKED = 2048
"""Elements of each group that are checked."""


@dataclass(frozen=True)
class Check:
    """Some elements of a bucket."""

    places: tuple[tuple[int, slice], ...]
    """The position of a group, and elements of the flat bucket."""
    p: Tensor
    """This rank's gradient plus residual there, in at least float32."""

    @classmethod
    def of(
        cls,
        bucket: GradBucket,
        groups: Iterable[tuple[int, ParameterGroup]],
        residual: Residual,
    ) -> "Check | None":
        """Copy elements of ``groups``, others in each step. None if there is no group."""
        strides = {
            name: (i, max(1, group.elements // _CHECKED) | 1)  # odd: not one column of a matrix
            for i, group in groups
            for name in group.names
        }
        if not strides:
            return None
        flat, places, parts = bucket.buffer(), list[tuple[int, slice]](), list[Tensor]()
        every = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        for (name, start, length), gradient in zip(every, bucket.gradients(), strict=True):
            if name not in strides:
                continue
            i, stride = strides[name]
            where = slice(bucket.step % stride, length, stride)
            p = flat[start : start + length][where].to(at_least_float32(flat.dtype), copy=True)
            rest = residual(name, gradient, where)
            parts.append(p if rest is None else p.add_(rest.to(p)))
            places.append((i, slice(start + where.start, start + length, stride)))
        return cls(tuple(places), torch.cat(parts))

    async def squares(self, average: Tensor, comm: Communicator) -> dict[int, Tensor]:
        """Return for each group the squared norms of the error and of the exact average.

        A float64 tensor of shape (2,) on the device of ``average``, which is flat.
        """
        exact = await average_exactly(self.p, comm)
        found: dict[int, Tensor] = {}
        for i, (wrong, right) in self._pairs(average, exact):
            squares = torch.stack([(wrong - right).square().sum(), right.square().sum()])
            found[i] = found[i] + squares if i in found else squares
        return found

    def _pairs(self, average: Tensor, exact: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        begin = 0
        for i, where in self.places:
            found = average[where].double()
            yield i, (found, exact[begin : begin + len(found)].double())
            begin += len(found)
