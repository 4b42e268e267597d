"""Compares averages of hooks with exact ones, at evenly spaced elements.

A check of the hooks in use sees what many steps have done to their residuals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.algorithms.wrappers.trial import Residual, average_exactly, squares_of
from commhooks.comm.communicator import Communicator
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["Check"]


@dataclass(frozen=True)
class Check:
    """Some elements of a bucket, as they are before it is averaged."""

    places: tuple[tuple[int, slice], ...]
    """The position of a group, and elements of the flat bucket."""
    p: Tensor
    """This rank's gradient plus residual there, in at least float32."""

    @classmethod
    def of(
        cls,
        bucket: GradBucket,
        groups: Mapping[int, Sequence[str]],
        residual: Residual,
        elements: int,
    ) -> "Check | None":
        """Copy about as many ``elements`` of each group, others in each step.

        ``groups``: the names of their parameters, by position. None if there is no group.
        """
        lengths = dict(zip(bucket.names, bucket.lengths, strict=True))
        strides = {
            name: (i, max(1, sum(lengths[n] for n in names) // elements) | 1)
            for i, names in groups.items()
            for name in names
        }  # odd: not one column of a matrix
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
        """Return the :func:`squares_of` each group, given the ``average`` of the bucket."""
        exact = await average_exactly(self.p, comm)
        flat, found, begin = average.view(-1), dict[int, Tensor](), 0
        for i, where in self.places:
            part = flat[where]
            squares = squares_of(part, exact[begin : begin + len(part)])
            found[i] = found[i] + squares if i in found else squares
            begin += len(part)
        return found
