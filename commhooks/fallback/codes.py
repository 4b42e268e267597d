"""Numbers to codes of a few bits and back, as in kernels/codecs/*.h.

Arrays of ratios and codes have the shape (blocks, block_size), those of scales (blocks, 1).
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint32]
Floats: TypeAlias = npt.NDArray[np.float32]

LARGEST, SIGNED, MEAN, ROOT_MEAN, EUCLIDEAN = range(5)
"""The norms of a block that its scale is made of."""


class Codes:
    """How the numbers of a block become codes of ``bits`` bits.

    If ``group`` is not 0, each ``group`` numbers have a scale of one byte.
    """

    bits: int
    group = 0
    norm = LARGEST

    def scale(self, largest: Floats, norm: Floats) -> Floats:
        """Return the scales of blocks with these largest magnitudes and norms."""
        raise NotImplementedError

    def encode(self, ratios: Floats, random: "BlockRandom") -> Words:
        """Return the codes of numbers that were divided by their scales."""
        raise NotImplementedError

    def decode(self, codes: Words) -> Floats:
        """Return numbers that are to be multiplied by their scales."""
        raise NotImplementedError

    def group_codes(self, ratios: Floats) -> Words:
        """Return the codes of groups whose largest magnitudes, over the scale, are ``ratios``."""
        raise NotImplementedError

    def group_scales(self, codes: Words) -> Floats:
        """Return the scales of groups, as multiples of the scale of the block."""
        raise NotImplementedError


def codes_named(name: str, norm: int, levels: float, clip: float) -> Codes:
    """Return the codes with the name of a C++ struct, such as "Levels<4, true>" or "E4M3"."""
    if name == "Sign":
        return Sign(norm)
    if name in _PLAIN:
        return _PLAIN[name]
    bits, stochastic = name.removeprefix("Levels<").removesuffix(">").split(", ")
    return Levels(int(bits), levels, norm, clip, stochastic == "true")


class Levels(Codes):
    """Evenly spaced levels: integers from -levels to levels, and one less for a signed norm."""

    def __init__(
        self, bits: int, levels: float, norm: int, clip: float, is_stochastic: bool
    ) -> None:
        self.bits = bits
        self.norm = norm
        self._levels = np.float32(levels)
        self._lowest = np.float32(-levels - (norm == SIGNED))
        self._clip = np.float32(clip)
        self._is_stochastic = is_stochastic

    def scale(self, largest: Floats, norm: Floats) -> Floats:
        if self.norm == EUCLIDEAN:
            return norm / self._levels
        if self.norm == SIGNED:
            return norm / self._lowest
        if self.norm == ROOT_MEAN:
            largest = np.minimum(norm * self._clip, largest)
        return largest / self._levels

    def encode(self, ratios: Floats, random: "BlockRandom") -> Words:
        wanted = np.clip(ratios, self._lowest, self._levels)
        levels = np.rint(wanted)  # ties to even
        if self._is_stochastic:
            # Take the level below, or the next one with the probability that makes the mean exact.
            levels -= levels > wanted
            levels += random.uniform() < wanted - levels
        return levels.astype(np.int32).view(np.uint32) & np.uint32(2**self.bits - 1)

    def decode(self, codes: Words) -> Floats:
        sign = 2 ** (self.bits - 1)
        return ((codes ^ np.uint32(sign)).astype(np.int32) - np.int32(sign)).astype(np.float32)


class SmallFloat(Codes):
    """Floating point in a few bits, rounded to nearest even, times the scale of the block."""

    def __init__(self, bits: int, mantissa: int, bias: int, largest: int) -> None:
        self.bits = bits
        self.largest = np.float32(largest)
        self._sign = np.uint32(1 << (bits - 1))
        self._to_sign = np.uint32(32 - bits)
        self._mantissa = mantissa
        self._shift = np.uint32(23 - mantissa)
        self._rebias = np.uint32((127 - bias) << 23)
        self._smallest_normal = np.uint32((128 - bias) << 23)
        self._smallest = np.float32(2.0 ** (1 - bias - mantissa))
        self._anchor = np.float32(2.0 ** (1 - bias - mantissa + 23))

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return largest / self.largest

    def encode(self, ratios: Floats, random: "BlockRandom | None" = None) -> Words:  # noqa: ARG002
        bits = ratios.view(np.uint32)
        magnitude = bits & np.uint32(0x7FFFFFFF)
        normal = (magnitude >> self._shift) & np.uint32(1)
        normal += magnitude
        normal += (np.uint32(1) << (self._shift - np.uint32(1))) - np.uint32(1)
        normal -= self._rebias  # wraps around only where it is not used
        normal >>= self._shift
        # The lowest bit of the sum is that of subnormal numbers, so the addition rounds.
        subnormal = (magnitude.view(np.float32) + self._anchor).view(np.uint32)
        subnormal -= self._anchor.view(np.uint32)
        np.copyto(normal, subnormal, where=magnitude < self._smallest_normal)
        normal |= (bits >> self._to_sign) & self._sign
        return normal

    def decode(self, codes: Words) -> Floats:
        magnitude = codes & (self._sign - np.uint32(1))
        normal = ((magnitude << self._shift) + self._rebias).view(np.float32)
        subnormal = magnitude.astype(np.float32) * self._smallest
        size = np.where(magnitude < 2**self._mantissa, subnormal, normal)
        return np.where(codes & self._sign, -size, size)


E4M3 = SmallFloat(8, 3, 7, 448)


class GroupedE2M1(SmallFloat):
    """4-bit floating point in groups, whose largest number may be above 6 of their scales."""

    def __init__(self) -> None:
        super().__init__(4, 1, 1, 6)

    def encode(self, ratios: Floats, random: "BlockRandom | None" = None) -> Words:
        return super().encode(np.clip(ratios, -self.largest, self.largest), random)


class Mxfp4(GroupedE2M1):
    """Scales of groups are powers of two."""

    group = 32

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return np.ones_like(largest)

    def group_codes(self, ratios: Floats) -> Words:
        exponents = ratios.view(np.uint32) >> np.uint32(23)
        codes: Words = np.maximum(exponents, np.uint32(3)) - np.uint32(2)
        return codes

    def group_scales(self, codes: Words) -> Floats:
        return (codes << np.uint32(23)).view(np.float32)


class Nvfp4(GroupedE2M1):
    """Scales of groups are e4m3, times the scale of the block."""

    group = 16

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return largest / (self.largest * E4M3.largest)

    def group_codes(self, ratios: Floats) -> Words:
        return E4M3.encode(ratios * (np.float32(1) / self.largest))

    def group_scales(self, codes: Words) -> Floats:
        return E4M3.decode(codes)


class Natural(Codes):
    """A sign and a power of two, rounded stochastically."""

    bits = 8
    _MANTISSA = np.uint32(0x7FFFFF)

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return ((largest.view(np.uint32) + self._MANTISSA) & ~self._MANTISSA).view(np.float32)

    def encode(self, ratios: Floats, random: "BlockRandom") -> Words:
        bits = ratios.view(np.uint32)
        carried = random.bits() & self._MANTISSA
        carried += bits & np.uint32(0x7FFFFFFF)
        codes: Words = (carried >> np.uint32(23)) | ((bits >> np.uint32(24)) & np.uint32(0x80))
        return codes

    def decode(self, codes: Words) -> Floats:
        sign, exponent = codes & np.uint32(0x80), codes & np.uint32(0x7F)
        return ((sign << np.uint32(24)) | (exponent << np.uint32(23))).view(np.float32)


class Sign(Codes):
    """1 for negative numbers; zeros get random signs."""

    bits = 1

    def __init__(self, norm: int) -> None:
        self.norm = norm

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return norm

    def encode(self, ratios: Floats, random: "BlockRandom") -> Words:
        codes: Words = ratios.view(np.uint32) >> np.uint32(31)
        is_zero = ratios == 0
        if is_zero.any():
            np.copyto(codes, random.coins(), where=is_zero)
        return codes

    def decode(self, codes: Words) -> Floats:
        return np.float32(1) - np.float32(2) * codes.astype(np.float32)


_PLAIN: dict[str, Codes] = {
    "E4M3": E4M3,
    "E5M2": SmallFloat(8, 2, 15, 57344),
    "E3M0": SmallFloat(4, 0, 3, 16),
    "Mxfp4": Mxfp4(),
    "Nvfp4": Nvfp4(),
    "Natural": Natural(),
}

# ------------------------------------------------------------------------------------ the scales

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


def _norms(norm: int, y: Floats, largest: Floats, counts: npt.NDArray[np.int64]) -> Floats:
    if norm == LARGEST:
        return largest
    if norm == SIGNED:
        return np.where(y.max(axis=1, keepdims=True) == largest, largest, -largest)
    ratios = y * (np.float32(1) / largest)
    terms = np.abs(ratios) if norm == MEAN else ratios * ratios
    size, total = largest.astype(np.float64), _sums(terms).astype(np.float64)
    if norm == MEAN:
        return (size * (total / counts)).astype(np.float32)
    if norm == ROOT_MEAN:
        total /= counts
    return (size * np.sqrt(total)).astype(np.float32)


def _sums(terms: Floats) -> Floats:
    """Return the sum over each block, (blocks, 1): Note [Order of sums] in block.h."""
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


# ---------------------------------------------------------------------------- random numbers

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
        self._seed = seed
        self._first = first
        self._shape = blocks, block_size

    def bits(self) -> Words:
        """Return 32 bits per number."""
        indices, seeds = self._indices_and_seeds()
        return random_bits(indices, seeds.astype(np.uint32), (seeds >> _32).astype(np.uint32))

    def coins(self) -> Words:
        """Return 0 or 1 per number."""
        indices, seeds = self._indices_and_seeds()
        coins: Words = (indices * _GOLDEN + seeds.astype(np.uint32)) >> np.uint32(31)
        return coins

    def uniform(self) -> Floats:
        """Return a multiple of 2^-24 in [0, 1) per number."""
        return (self.bits() >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)

    def _indices_and_seeds(self) -> tuple[Words, npt.NDArray[np.uint64]]:
        """Return the lower words of all indices, and the seed of each block, (blocks, 1)."""
        blocks, block_size = self._shape
        starts = np.arange(blocks, dtype=np.uint64)[:, None] * np.uint64(block_size)
        starts += np.uint64(self._first)
        seeds = (starts >> _32) * _GOLDEN_64 + np.uint64(self._seed % 2**64)
        offsets = np.arange(block_size, dtype=np.uint32)
        return np.add(starts.astype(np.uint32), offsets, dtype=np.uint32), seeds
