"""The scales of blocks, as in kernels/codecs/block.h: Note [Order of sums] is there."""

import numpy as np
import numpy.typing as npt

from commhooks.pure.codes import Codes, Norm
from commhooks.pure.random import Floats, Words

__all__ = ["find_scales"]

_LARGEST_NUMBER = np.float32(2.0**126).view(np.uint32)
_SMALLEST_LARGEST = np.float32(2.0**-100).view(np.uint32)
_CHUNK = 512
_TILE = 64


def find_scales(
    codes: Codes, y: Floats, counts: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the scales of blocks and whether they have one, both (blocks, 1).

    ``y``, (blocks, block_size), has zeros after the ``counts`` numbers of each block. The scale of
    a block without one is 0 or NaN.
    """
    bits: Words = (y.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=1, keepdims=True)
    largest = bits.view(np.float32)
    scales = codes.scale(largest, _norms(codes.norm, y, largest, counts[:, None]))
    has_scale = (bits >= _SMALLEST_LARGEST) & (bits <= _LARGEST_NUMBER)
    without = np.where(bits < _SMALLEST_LARGEST, np.float32(0), np.float32(np.nan))
    return np.where(has_scale, scales, without), has_scale


def _norms(norm: Norm, y: Floats, largest: Floats, counts: npt.NDArray[np.int64]) -> Floats:
    if norm is Norm.LARGEST:
        return largest
    if norm is Norm.SIGNED:
        return np.where(y.max(axis=1, keepdims=True) == largest, largest, -largest)
    ratios = y * (np.float32(1) / largest)
    terms = np.abs(ratios) if norm is Norm.MEAN else ratios * ratios
    size, total = largest.astype(np.float64), _sums(terms).astype(np.float64)
    if norm is Norm.MEAN:
        return (size * (total / counts)).astype(np.float32)
    if norm is Norm.ROOT_MEAN:
        total /= counts
    return (size * np.sqrt(total)).astype(np.float32)


def _sums(terms: Floats) -> Floats:
    """Return the sum over each block, (blocks, 1), in the order of the note."""
    blocks, size = terms.shape
    padded = max(1 << (size - 1).bit_length(), _TILE)
    if padded > size:
        terms = np.pad(terms, ((0, 0), (0, padded - size)))
    chunks = terms.reshape(blocks, -1, min(padded, _CHUNK))
    while chunks.shape[2] > 1:
        half = chunks.shape[2] // 2
        chunks = chunks[:, :, :half] + chunks[:, :, half:]
    while chunks.shape[1] > 1:
        half = chunks.shape[1] // 2
        chunks = chunks[:, :half] + chunks[:, half:]
    return chunks[:, :, 0]
