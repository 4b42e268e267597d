"""Shards of the gradients of a bucket, one for each rank of a node.

Note [Shards by rows]
~~~~~~~~~~~~~~~~~~~~~
Of each parameter, shard r has rows r·k to (r+1)·k. Rows are counted along the dimension that is
outermost in memory, so k of them are one piece of the buffer::

    buffer    a0 a1 a2 a3 a4 | b0 b1 | c0                  rows of parameters a, b and c
    shard 0   a0 a1 a2 | b0 | c0
    shard 1   a3 a4 0  | b1 | 0                            zeros make all shards equal

FSDP2 shards parameters in this way, so hooks find in a shard what they find there. Equal parts of
the buffer would need no zeros. But when buckets are rebuilt, each part would have other parameters,
and the state of a hook would be on the wrong rank; and low-rank hooks would find no matrices.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.algorithms.bucket_parameters import parameters_of
from commhooks.hook.derived_bucket import bucket_with
from reducer import GradBucket

__all__ = ["BucketShards", "shard_of"]


class _Piece(NamedTuple):
    """Where a parameter lies in the buffer, and where in each shard."""

    begin: int
    end: int
    shard_begin: int
    shard_end: int


class BucketShards:
    """Cuts the gradients of a bucket into ``size`` equal shards: Note [Shards by rows]."""

    def __init__(self, bucket: GradBucket, size: int) -> None:
        self._size = size
        self._pieces: list[_Piece] = []
        self.numel = 0
        """The number of elements of a shard."""
        for begin, gradient in zip(bucket.offsets, bucket.gradients(), strict=True):
            shard = shard_of(gradient, gradient, 0, size).numel()
            own = self.numel, self.numel + shard
            self._pieces.append(_Piece(begin, begin + gradient.numel(), *own))
            self.numel += shard

    def split(self, flat: Tensor, shards: Tensor, divisor: Tensor | float) -> None:
        """Write the gradients ``flat``, divided by ``divisor``, to ``shards``: (size, numel)."""
        padding = flat.new_zeros(()).div_(divisor)  # NaN if the divisor is
        for piece in self._pieces:
            columns = shards[:, piece.shard_begin : piece.shard_end]
            whole, rest = self._rows(flat, piece)
            torch.div(whole, divisor, out=columns[: len(whole)])
            if len(whole) < self._size:
                columns[len(whole) :].copy_(padding)
                torch.div(rest, divisor, out=columns[len(whole), : rest.numel()])

    def join(self, shards: Tensor, flat: Tensor) -> None:
        """Copy ``shards``, (size, numel), back to the gradients ``flat``."""
        for piece in self._pieces:
            columns = shards[:, piece.shard_begin : piece.shard_end]
            whole, rest = self._rows(flat, piece)
            whole.copy_(columns[: len(whole)])
            if rest.numel() > 0:
                rest.copy_(columns[len(whole), : rest.numel()])

    def bucket(self, whole: GradBucket, shard: Tensor, rank: int) -> GradBucket:
        """Return a bucket of the parameters' shards of ``rank``, whose gradients are ``shard``."""
        gradients = zip(parameters_of(whole), whole.gradients(), strict=True)
        parameters = [shard_of(p.detach(), gradient, rank, self._size) for p, gradient in gradients]
        return bucket_with(whole, shard, parameters=parameters)

    def _rows(self, flat: Tensor, piece: _Piece) -> tuple[Tensor, Tensor]:
        """Return what lies in complete shards, (shards, length), and the rest."""
        length = piece.shard_end - piece.shard_begin
        if length == 0:
            return flat.new_empty((self._size, 0)), flat.new_empty(0)
        complete = (piece.end - piece.begin) // length
        middle = piece.begin + complete * length
        return flat[piece.begin : middle].view(complete, length), flat[middle : piece.end]


def shard_of(parameter: Tensor, gradient: Tensor, rank: int, size: int) -> Tensor:
    """Return a view of ``parameter`` in the form of its shard on ``rank``.

    ``gradient`` tells how it lies in a bucket. If the shard ends with zeros, the view begins at an
    earlier row, because the parameter has no such rows. So only the form is of use then.
    """
    if gradient.dim() == 0:
        return parameter.view(1)
    if gradient.numel() == 0:
        return parameter
    dim = _outermost(gradient.shape, gradient.stride())
    rows = gradient.shape[dim]
    length = -(-rows // size)
    return parameter.narrow(dim, min(rank * length, rows - length), length)


def _outermost(shape: torch.Size, strides: Sequence[int]) -> int:
    """Return the dimension whose rows are contiguous pieces of memory."""
    return max(range(len(shape)), key=lambda dim: (shape[dim] > 1, strides[dim], -dim))
