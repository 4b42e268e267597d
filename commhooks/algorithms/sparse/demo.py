"""Decoupled momentum: each rank sends the strongest frequencies of its momentum, keeps the rest.

A step with the gradient ``g[i]`` and the momentum ``m[i]`` of each rank i of N, where ``dct`` and
``idct`` transform tiles and ``top`` keeps the k largest coefficients of each::

    for i in range(N):
        m[i] = decay * m[i] + g[i]
        q[i] = top(dct(m[i]))
        m[i] = m[i] - idct(q[i])
    result = idct(sum(q) / N)    # an all-gather of values and indices
    # with sign=True: result = result.sign()

Peng, Chen, Su, Quesnelle, Kingma, Liu: DeMo: Decoupled Momentum Optimization, ICLR 2026,
https://arxiv.org/abs/2411.19870.

Note [Tiles]
~~~~~~~~~~~~
A parameter counts as a matrix: its first dimension, and all others together. A vector is one row.
Each side of a tile is the largest divisor of the matrix's side up to ``side``, so tiles fill the
matrix. The transform of a tile X is A·X·Bᵀ with the orthonormal matrices A and B of the DCT-II, so
it keeps lengths, and its inverse is Aᵀ·X·B.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from commhooks.algorithms.sparse.base import SparseHook
from commhooks.algorithms.sparse.messages import SparseVector, gather, gather_bytes, to_memory_dtype
from commhooks.algorithms.sparse.selection import elements_to_send, select_largest_of_chunks
from commhooks.codecs.finite import copy_if, is_known_false
from commhooks.comm.communicator import Communicator
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from reducer import GradBucket


@register_hook("demo")
@dataclass
class DeMo(SparseHook):
    """Average the strongest frequencies of each rank's momentum; the rest stays in the momentum.

    The hook has the momentum: **use plain SGD**, without momentum. Because what is sent leaves the
    momentum, the results of all steps add up to about the sum of the gradients, as with SGD without
    momentum: the learning rate is 1 / (1 - m) times that of SGD with momentum m.

    Momenta are transformed in tiles of matrices, as in the paper, and k coefficients are sent of
    each ``tile * tile``. The average is over all ranks, also for frequencies that only some sent.

    The hook keeps the momentum, and during a step four more copies of a bucket. Results are the
    same bits on all ranks if these compute products of matrices with the same bits: on CPUs or GPUs
    of one kind, with one version of torch.
    """

    density: Annotated[float, Limits(gt=0, le=1)] = 1 / 128
    """k as a share of the coefficients of a tile: 32 of 4096."""
    decay: Annotated[float, Limits(ge=0, le=1)] = 0.999
    """The factor by which a step decays the momentum."""
    tile: Annotated[int, Limits(ge=1, le=256)] = 64
    """The largest side of a tile."""
    sign: bool = False
    """Return the signs of the result, as the paper does. The learning rate is then that of Adam.
    Neither a GradScaler nor clipping by norm has a meaning for signs."""

    error_feedback: bool = field(default=True, init=False, repr=False)
    error_dtype: torch.dtype | None = field(default=None, init=False, repr=False)

    capturable_from = 0
    keeps = "momentum"
    gets_each_once = True
    paper = "https://arxiv.org/abs/2411.19870"

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        momentum = self._errors.of(bucket, self.state)
        total = to_memory_dtype(buffer).add_(momentum, alpha=self.decay)
        coefficients = to_frequencies(bucket_with(bucket, total).gradients(), self.tile)
        indices = select_largest_of_chunks(coefficients, None, self.tile**2, self._per_tile)
        own = SparseVector.of(coefficients, indices, buffer.dtype)
        gathered = await gather(own, [own.count] * comm.size, comm)
        if is_known_false(gathered.all_finite):
            return buffer.fill_(torch.nan)
        sent = self._inverse(bucket, own.dense(total.dtype))
        copy_if(gathered.all_finite, total.sub_(sent), momentum)
        mean = gathered.commit(coefficients, None, torch.empty_like(buffer))
        result = self._inverse(bucket, mean.to(total.dtype))
        if self.sign:  # torch.sign(NaN) is 0
            result = torch.where(result.isnan(), result, result.sign())
        return buffer.copy_(result)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        whole, rest = divmod(bucket.buffer().numel(), self.tile**2)
        count = whole * self._per_tile + min(rest, self._per_tile)
        return gather_bytes(bucket, count, size)

    @property
    def _per_tile(self) -> int:
        return elements_to_send(self.density, self.tile**2)

    def _inverse(self, bucket: GradBucket, coefficients: Tensor) -> Tensor:
        """Return the flat tensor, in the bucket's order, that has these coefficients."""
        flat = torch.empty_like(coefficients)
        from_frequencies(coefficients, bucket_with(bucket, flat).gradients(), self.tile)
        return flat


def to_frequencies(tensors: Sequence[Tensor], side: int) -> Tensor:
    """Return the coefficients of all tensors, flat, one tile after the other."""
    parts = []
    for i, (rows, columns, height, width) in _tilings(tensors, side):
        tiles = tensors[i].reshape(rows, height, columns, width).transpose(1, 2)
        A, B = _matrices(height, width, tiles)
        parts.append((A @ tiles @ B.T).flatten())
    return torch.cat(parts) if parts else torch.cat([tensor.flatten() for tensor in tensors])


def from_frequencies(coefficients: Tensor, tensors: Sequence[Tensor], side: int) -> None:
    """Write what :func:`to_frequencies` has transformed into ``tensors``."""
    start = 0
    for i, (rows, columns, height, width) in _tilings(tensors, side):
        stop = start + tensors[i].numel()
        tiles = coefficients[start:stop].view(rows, columns, height, width)
        A, B = _matrices(height, width, tiles)
        tensors[i].copy_((A.T @ tiles @ B).transpose(1, 2).reshape(tensors[i].shape))
        start = stop


_Tiling: TypeAlias = tuple[int, int, int, int]
"""Rows and columns of tiles of a matrix, and the sides of a tile: Note [Tiles]."""


def _tilings(tensors: Sequence[Tensor], side: int) -> list[tuple[int, _Tiling]]:
    """Return the number and the tiling of each tensor with elements, those with full tiles first.

    A chunk of ``side * side`` coefficients is then one tile, except among small ones.
    """
    found = []
    for i, tensor in enumerate(tensors):
        if tensor.numel() > 0:
            rows = len(tensor) if tensor.dim() > 1 else 1
            columns = tensor.numel() // rows
            height, width = _divisor(rows, side), _divisor(columns, side)
            found.append((i, (rows // height, columns // width, height, width)))
    return sorted(found, key=lambda item: item[1][2] * item[1][3] < side * side)


def _matrices(height: int, width: int, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices of both sides of the tiles."""
    A, B = (dct_matrix(size, tiles.dtype, tiles.device) for size in (height, width))
    return A, B


@functools.lru_cache(maxsize=1024)
def _divisor(number: int, largest: int) -> int:
    """Return the largest divisor of ``number`` up to ``largest``."""
    return next(n for n in range(min(number, largest), 0, -1) if number % n == 0)


@functools.lru_cache(maxsize=256)
def dct_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal matrix of the DCT-II: row k is the cosine of frequency k."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    position = torch.arange(size, dtype=torch.float64) + 0.5
    cosines = torch.cos(math.pi / size * frequency * position) * math.sqrt(2 / size)
    cosines[0] /= math.sqrt(2)
    return cosines.to(device, dtype)
