"""The codes of block codecs, as in kernels/codecs: levels.h, fp8.h, fp4.h and so on.

Arrays of ratios and codes have the shape (blocks, block_size), those of scales (blocks, 1).
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from commhooks.pure.random import BlockRandom, Floats, Words

__all__ = [
    "E3M0",
    "E4M3",
    "E5M2",
    "BlockFloat",
    "Codes",
    "GroupCodes",
    "Levels",
    "Mxfp4",
    "Natural",
    "Norm",
    "Nvfp4",
    "Sign",
]


class Norm(Enum):
    """The norm of a block that its scale is made of."""

    LARGEST = auto()
    SIGNED = auto()
    MEAN = auto()
    ROOT_MEAN = auto()
    EUCLIDEAN = auto()


class Codes(Protocol):
    """How the numbers of a block become codes of ``bits`` bits."""

    @property
    def bits(self) -> int: ...

    @property
    def norm(self) -> Norm: ...

    def scale(self, largest: Floats, norm: Floats) -> Floats:
        """Return the scales of blocks with these largest magnitudes and norms."""

    def encode(self, ratios: Floats, random: BlockRandom) -> Words:
        """Return the codes of numbers that were divided by their scales."""

    def decode(self, codes: Words) -> Floats:
        """Return numbers that are to be multiplied by their scales."""


@runtime_checkable
class GroupCodes(Codes, Protocol):
    """Codes of numbers in groups of ``group``, which have scales of one byte."""

    @property
    def group(self) -> int: ...

    def group_codes(self, ratios: Floats) -> Words:
        """Return the codes of groups whose largest magnitudes, over the scale, are ``ratios``."""

    def group_scales(self, codes: Words) -> Floats:
        """Return the scales of groups, as multiples of the scale of the block."""


@dataclass(frozen=True)
class Levels:
    """Evenly spaced levels: integers from -levels to levels, and one less for a signed norm."""

    bits: int
    levels: int
    norm: Norm
    clip: float
    stochastic: bool

    def scale(self, largest: Floats, norm: Floats) -> Floats:
        levels = np.float32(self.levels)
        if self.norm is Norm.EUCLIDEAN:
            return norm / levels
        if self.norm is Norm.SIGNED:
            return norm / self._lowest
        if self.norm is Norm.ROOT_MEAN:
            clipped: Floats = np.minimum(norm * np.float32(self.clip), largest)
            return clipped / levels
        return largest / levels

    def encode(self, ratios: Floats, random: BlockRandom) -> Words:
        limit = np.float32(self.levels)
        wanted = np.clip(ratios, self._lowest, limit)
        levels = np.rint(wanted)  # ties to even
        if self.stochastic:
            # Take the level below, or the next one with the probability that makes the mean exact.
            levels -= levels > wanted
            levels += random.uniform() < wanted - levels
        return levels.astype(np.int32).view(np.uint32) & np.uint32(2**self.bits - 1)

    def decode(self, codes: Words) -> Floats:
        sign = 2 ** (self.bits - 1)
        return ((codes ^ np.uint32(sign)).astype(np.int32) - np.int32(sign)).astype(np.float32)

    @property
    def _lowest(self) -> np.float32:
        return np.float32(-self.levels - (self.norm is Norm.SIGNED))


class SmallFloat:
    """Floating point in a few bits, rounded to nearest even."""

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

    def encode(self, numbers: Floats) -> Words:
        bits = numbers.view(np.uint32)
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


E2M1 = SmallFloat(4, 1, 1, 6)
E3M0 = SmallFloat(4, 0, 3, 16)
E4M3 = SmallFloat(8, 3, 7, 448)
E5M2 = SmallFloat(8, 2, 15, 57344)


class BlockFloat:
    """Numbers of a format, times the scale of their block."""

    norm = Norm.LARGEST

    def __init__(self, number_format: SmallFloat) -> None:
        self.bits = number_format.bits
        self._format = number_format

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return largest / self._format.largest

    def encode(self, ratios: Floats, random: BlockRandom) -> Words:  # noqa: ARG002
        return self._format.encode(ratios)

    def decode(self, codes: Words) -> Floats:
        return self._format.decode(codes)


class _GroupedE2M1:
    """4-bit floating point in groups."""

    bits = 4
    norm = Norm.LARGEST

    def encode(self, ratios: Floats, random: BlockRandom) -> Words:  # noqa: ARG002
        return E2M1.encode(np.clip(ratios, -E2M1.largest, E2M1.largest))

    def decode(self, codes: Words) -> Floats:
        return E2M1.decode(codes)


class Mxfp4(_GroupedE2M1):
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


class Nvfp4(_GroupedE2M1):
    """Scales of groups are e4m3, times the scale of the block."""

    group = 16

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return largest / (E2M1.largest * E4M3.largest)

    def group_codes(self, ratios: Floats) -> Words:
        return E4M3.encode(ratios * (np.float32(1) / E2M1.largest))

    def group_scales(self, codes: Words) -> Floats:
        return E4M3.decode(codes)


class Natural:
    """A sign and a power of two, rounded stochastically."""

    bits = 8
    norm = Norm.LARGEST
    _MANTISSA: ClassVar = np.uint32(0x7FFFFF)

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return ((largest.view(np.uint32) + self._MANTISSA) & ~self._MANTISSA).view(np.float32)

    def encode(self, ratios: Floats, random: BlockRandom) -> Words:
        bits = ratios.view(np.uint32)
        carried = random.bits() & self._MANTISSA
        carried += bits & np.uint32(0x7FFFFFFF)
        codes: Words = (carried >> np.uint32(23)) | ((bits >> np.uint32(24)) & np.uint32(0x80))
        return codes

    def decode(self, codes: Words) -> Floats:
        sign, exponent = codes & np.uint32(0x80), codes & np.uint32(0x7F)
        return ((sign << np.uint32(24)) | (exponent << np.uint32(23))).view(np.float32)


@dataclass(frozen=True)
class Sign:
    """1 for negative numbers; zeros get random signs."""

    norm: Norm
    bits: ClassVar[int] = 1

    def scale(self, largest: Floats, norm: Floats) -> Floats:  # noqa: ARG002
        return norm

    def encode(self, ratios: Floats, random: BlockRandom) -> Words:
        codes: Words = ratios.view(np.uint32) >> np.uint32(31)
        is_zero = ratios == 0
        if is_zero.any():
            np.copyto(codes, random.coins(), where=is_zero)
        return codes

    def decode(self, codes: Words) -> Floats:
        return np.float32(1) - np.float32(2) * codes.astype(np.float32)
