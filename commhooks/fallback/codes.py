"""Numbers to codes of a few bits and back: what kernels/codecs/*.h compute.

Arrays of ratios and codes have the shape (blocks, block_size), those of scales (blocks, 1).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Codes: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Words: TypeAlias = npt.NDArray[np.uint32]
Floats: TypeAlias = npt.NDArray[np.float32]

LARGEST, SIGNED, MEAN, ROOT_MEAN, EUCLIDEAN = range(5)
"""The norms of a block that its scale is made of."""


@dataclass(frozen=True)
class Format:
    """The mapping from the numbers of a block to codes of ``bits`` bits.

    If ``group`` is not 0, each ``group`` numbers have a scale of one byte.
    """

    bits: int
    values: Floats
    """The number of each code, to be multiplied by the scale."""
    scale: Callable[[Floats, Floats], Floats]
    """Returns the scales of blocks with these largest magnitudes and norms."""
    encode: Callable[[Floats, "BlockRandom"], Codes]
    """Returns the codes of numbers that were divided by their scales."""
    norm: int = LARGEST
    group: int = 0
    group_codes: Callable[[Floats], Codes] = lambda ratios: ratios.view(np.uint32)
    """Returns the codes of groups whose largest magnitudes, over the scale, are ``ratios``."""
    group_scales: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    """The scale of a group for each code, as a multiple of the scale of the block."""


def format_named(codes: str, norm: int, levels: float, clip: float) -> Format:
    """Return the format for the name of a C++ struct, such as "Levels<4, true>" or "E4M3"."""
    if codes == "Sign":
        return Format(1, np.array([1, -1], np.float32), lambda _, size: size, _sign, norm)
    if codes in _PLAIN:
        return _PLAIN[codes]
    bits, stochastic = codes.removeprefix("Levels<").removesuffix(">").split(", ")
    return _levels(int(bits), norm, levels, clip, is_stochastic=stochastic == "true")


# ------------------------------------------------------------------------------------ the formats


def _levels(bits: int, norm: int, levels: float, clip: float, *, is_stochastic: bool) -> Format:
    """Return integers from -levels to levels, and one less for a signed norm."""
    highest, lowest = np.float32(levels), np.float32(-levels - (norm == SIGNED))

    def scale(largest: Floats, size: Floats) -> Floats:
        if norm == SIGNED:
            return size / lowest
        if norm == ROOT_MEAN:
            size = np.minimum(size * np.float32(clip), largest)
        return (largest if norm == LARGEST else size) / highest

    def encode(ratios: Floats, random: "BlockRandom") -> Codes:
        wanted = np.clip(ratios, lowest, highest)
        found = np.rint(wanted)  # ties to even
        if is_stochastic:
            # Take the level below, or the next one with the probability that makes the mean exact.
            found -= found > wanted
            found += random.uniform() < wanted - found
        return found.astype(np.int32).view(np.uint32) & np.uint32(2**bits - 1)

    half = 2 ** (bits - 1)
    values = np.array([*range(half), *range(-half, 0)], np.float32)
    return Format(bits, values, scale, encode, norm)


def _sign(ratios: Floats, random: "BlockRandom") -> Codes:
    """Return 1 for negative numbers; zeros get random signs."""
    codes: Codes = ratios.view(np.uint32) >> np.uint32(31)
    is_zero = ratios == 0
    if is_zero.any():
        np.copyto(codes, random.coins(), where=is_zero)
    return codes


_MANTISSA = np.uint32(0x7FFFFF)


def _power_scale(largest: Floats, _: Floats) -> Floats:
    """Return the power of two at or above the largest number."""
    return ((largest.view(np.uint32) + _MANTISSA) & ~_MANTISSA).view(np.float32)


def _natural(ratios: Floats, random: "BlockRandom") -> Codes:
    """Return a sign and an exponent, rounded stochastically."""
    bits = ratios.view(np.uint32)
    carried = (random.bits() & _MANTISSA) + (bits & np.uint32(0x7FFFFFFF))
    return (carried >> np.uint32(23)) | ((bits >> np.uint32(24)) & np.uint32(0x80))


def _float_values(bits: int, mantissa: int, bias: int) -> Floats:
    """Return the numbers of all codes with a sign, an exponent and a mantissa."""
    codes = np.arange(2 ** (bits - 1))
    exponents, fractions = codes >> mantissa, codes % 2**mantissa / 2**mantissa
    normal = (1 + fractions) * 2.0 ** (exponents - bias)
    sizes = np.where(exponents > 0, normal, fractions * 2.0 ** (1 - bias))
    return np.concatenate([sizes, -sizes]).astype(np.float32)


def _to_fp8(dtype: torch.dtype, ratios: Floats, _: Any = None) -> Codes:
    """Return the codes of torch's dtype, rounded to nearest even."""
    codes: Codes = torch.from_numpy(ratios).to(dtype).view(torch.uint8).numpy()
    return codes


def _to_fp4(values: Floats, ratios: Floats, _: Any) -> Codes:
    """Return the codes of the nearest ``values``, ties to even; the largest for larger numbers."""
    middles = np.append((values[1:8] + values[:7]) / 2, np.float32(np.inf))
    size = np.abs(ratios)
    codes = np.searchsorted(middles, size)
    codes += (codes & 1) & (middles.take(codes, mode="clip") == size)
    codes |= np.signbit(ratios).astype(np.intp) << 3
    return codes.astype(np.uint8)


def _over(largest_value: float) -> Callable[[Floats, Floats], Floats]:
    """Return what maps the largest number of a block to the largest number of a format."""
    return lambda largest, _: largest / np.float32(largest_value)


_E4M3, _E5M2 = _float_values(8, 3, 7), _float_values(8, 2, 15)
_E2M1, _E3M0 = _float_values(4, 1, 1), _float_values(4, 0, 3)
_to_e4m3 = partial(_to_fp8, torch.float8_e4m3fn)
_POWERS = (np.arange(256, dtype=np.uint32) << np.uint32(23)).view(np.float32)
_PLAIN = {
    "E4M3": Format(8, _E4M3, _over(448), _to_e4m3),
    "E5M2": Format(8, _E5M2, _over(57344), partial(_to_fp8, torch.float8_e5m2)),
    "E3M0": Format(4, _E3M0, _over(16), partial(_to_fp4, _E3M0)),
    "Mxfp4": Format(
        4,
        _E2M1,
        lambda largest, _: np.ones_like(largest),
        partial(_to_fp4, _E2M1),
        group=32,
        group_codes=lambda ratios: (
            np.maximum(ratios.view(np.uint32) >> np.uint32(23), np.uint32(3)) - np.uint32(2)
        ),
        group_scales=_POWERS,
    ),
    "Nvfp4": Format(
        4,
        _E2M1,
        _over(6 * 448),
        partial(_to_fp4, _E2M1),
        group=16,
        group_codes=lambda ratios: _to_e4m3(ratios * (np.float32(1) / np.float32(6))),
        group_scales=_E4M3,
    ),
    "Natural": Format(8, np.concatenate([_POWERS[:128], -_POWERS[:128]]), _power_scale, _natural),
}

# ------------------------------------------------------------------------------------- the scales

_LARGEST_NUMBER, _SMALLEST_LARGEST = 2.0**126, 2.0**-100
_CHUNK, _TILE = 512, 64


def find_scales(
    number_format: Format, y: Floats, counts: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the scales of blocks and whether they have one, both (blocks, 1).

    ``y``, (blocks, block_size), has zeros after the ``counts``, (blocks, 1), numbers of each block.
    The scale of a block without one is 0 or NaN.
    """
    largest = np.abs(y).max(axis=1, keepdims=True)  # NaN if there is one
    scales = number_format.scale(largest, _norms(number_format.norm, y, largest, counts))
    has_scale = (largest >= _SMALLEST_LARGEST) & (largest <= _LARGEST_NUMBER)
    without = np.where(largest < _SMALLEST_LARGEST, np.float32(0), np.float32(np.nan))
    return np.where(has_scale, scales, without), has_scale


def _norms(norm: int, y: Floats, largest: Floats, counts: npt.NDArray[np.int64]) -> Floats:
    if norm == LARGEST:
        return largest
    if norm == SIGNED:
        return np.where(y.max(axis=1, keepdims=True) == largest, largest, -largest)
    ratios = y * (np.float32(1) / largest)
    total = _sums(np.abs(ratios) if norm == MEAN else ratios * ratios).astype(np.float64)
    if norm != EUCLIDEAN:
        total /= counts
    size = total if norm == MEAN else np.sqrt(total)
    return (largest.astype(np.float64) * size).astype(np.float32)


def _sums(terms: Floats) -> Floats:
    """Return the sum over each block, (blocks, 1): Note [Order of sums] in block.h."""
    blocks, size = terms.shape
    padded = max(1 << (size - 1).bit_length(), _TILE)
    chunks = np.pad(terms, ((0, 0), (0, padded - size))) if padded > size else terms
    for length in (min(padded, _CHUNK), max(padded // _CHUNK, 1)):
        chunks = chunks.reshape(blocks, -1, length)
        while chunks.shape[2] > 1:
            half = chunks.shape[2] // 2
            chunks = chunks[:, :, :half] + chunks[:, :, half:]
    return chunks[:, :, 0]


# -------------------------------------------------------------------------------- random numbers

_GOLDEN = np.uint32(0x9E3779B1)
_32 = np.uint64(32)
_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)


def random_bits(indices: Words, low: Any, high: Any) -> Words:
    """Return 32 random bits per index for the seed whose words are ``low`` and ``high``."""
    bits = indices * _GOLDEN
    bits += low
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(0x85EBCA6B)
    bits ^= high
    bits ^= bits >> np.uint32(13)
    bits *= np.uint32(0xC2B2AE35)
    bits ^= bits >> np.uint32(16)
    return bits


class BlockRandom:
    """The random numbers of several blocks, in the shape (blocks, block_size).

    ``first`` is the index of the first number of the first block.
    """

    def __init__(self, seed: int, first: int, blocks: int, block_size: int) -> None:
        self._starts = np.arange(blocks, dtype=np.uint64)[:, None] * np.uint64(block_size)
        self._starts += np.uint64(first)
        seeds = (self._starts >> _32) * _GOLDEN_64 + np.uint64(seed % 2**64)
        self._low, self._high = seeds.astype(np.uint32), (seeds >> _32).astype(np.uint32)
        self._offsets = np.arange(block_size, dtype=np.uint32)

    def bits(self) -> Words:
        """Return 32 bits per number."""
        return random_bits(self._indices(), self._low, self._high)

    def coins(self) -> Words:
        """Return 0 or 1 per number."""
        return (self._indices() * _GOLDEN + self._low) >> np.uint32(31)

    def uniform(self) -> Floats:
        """Return a multiple of 2^-24 in [0, 1) per number."""
        return (self.bits() >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)

    def _indices(self) -> Words:
        """Return the lower words of all indices."""
        return self._starts.astype(np.uint32) + self._offsets
