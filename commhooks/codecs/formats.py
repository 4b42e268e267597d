"""The formats in which codecs send numbers: each is declared here, once for all implementations.

The arithmetic of a format is written twice: here, in torch's operations, which commhooks/fallback
runs and tests compare everything with, and as a struct of the same name in kernels/codecs, for
which the loops in csrc/codecs and the CUDA kernels are compiled.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from commhooks.fallback.blocks import BlockRandom

_MANTISSA = 0x7FFFFF


class Norm(IntEnum):
    """The norm of a block that a format needs for the scale, as in kernels/codecs/block.h."""

    LARGEST = 0
    SIGNED = 1
    MEAN = 2
    ROOT_MEAN = 3
    EUCLIDEAN = 4


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """The mapping from the numbers of a block to codes of ``bits`` bits.

    ``codes`` is the name of a C++ struct in kernels/codecs/formats.h. ``norm`` is what ``scale``
    takes; ``levels`` and ``clip`` are options of ``Levels``. With ``is_vote``, several messages
    vote instead of being averaged. ``group``: how many numbers share a scale of one byte, or 0;
    then blocks are multiples of 128. ``is_stochastic``: whether rounding takes random numbers.

    Tensors are float32: scales in the shape (blocks, 1), numbers and codes (blocks, block_size).
    """

    codes: str
    bits: int
    norm: Norm = Norm.LARGEST
    levels: int = 0
    clip: float = math.inf
    is_vote: bool = False
    group: int = 0
    is_stochastic: bool = False

    @abstractmethod
    def numbers(self) -> Tensor:
        """Return the number of each code, to be multiplied by the scales."""

    @abstractmethod
    def scale(self, largest: Tensor, norm: Tensor) -> Tensor:
        """Return the scales of blocks with these largest magnitudes and norms."""

    @abstractmethod
    def code(self, ratio: Tensor, random: "BlockRandom") -> Tensor:
        """Return the codes, uint8, of numbers that were divided by their scales.

        Those of blocks without a scale are not used.
        """

    def group_code(self, ratio: Tensor) -> Tensor:  # noqa: ARG002
        """Return the codes, uint8, of groups with these largest magnitudes over the scale."""
        raise ValueError(f"the format {self.codes} has no groups")

    def group_scales(self) -> Tensor:
        """Return the scale of a group for each code, as a multiple of the scale of the block."""
        return torch.empty(0)


# ------------------------------------------------------------------------------------------ floats


@dataclass(frozen=True, kw_only=True)
class BlockFloat(Format):
    """Floating point numbers, rounded to nearest even, with the largest number of a block as the
    ``largest`` of the format.

    Codes are a sign, an exponent with this ``bias`` and ``mantissa`` bits, with subnormal numbers
    and without infinity and NaN.
    """

    mantissa: int
    bias: int
    largest: float

    def numbers(self) -> Tensor:
        one = 2**self.mantissa
        sizes = [
            math.ldexp(code % one + one * (code >= one), max(code // one, 1) - self.bias)
            for code in range(2 ** (self.bits - 1))
        ]
        return torch.tensor(sizes + [-size for size in sizes]).div(one)

    def scale(self, largest: Tensor, norm: Tensor) -> Tensor:  # noqa: ARG002
        return largest.div(self.largest)

    def code(self, ratio: Tensor, random: "BlockRandom | None" = None) -> Tensor:  # noqa: ARG002
        magnitude = ratio.abs().clamp_(max=self.largest).view(torch.int32)
        shift, rebias = 23 - self.mantissa, (127 - self.bias) << 23
        is_odd = (magnitude >> shift).bitwise_and_(1)  # ties to even
        normal = is_odd.add_(magnitude).sub_(rebias - (1 << shift - 1) + 1) >> shift
        # The lowest bit of the sum is that of subnormal numbers, so the addition rounds.
        anchor = torch.tensor(2.0 ** (24 - self.bias - self.mantissa))
        subnormal = (magnitude.view(torch.float32) + anchor).view(torch.int32)
        subnormal -= anchor.view(torch.int32)
        size = torch.where(magnitude < rebias + (1 << 23), subnormal, normal)
        sign = (ratio.view(torch.int32) >> (32 - self.bits)).bitwise_and_(1 << self.bits - 1)
        return sign.bitwise_or_(size).to(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class _Mxfp4(BlockFloat):
    def scale(self, largest: Tensor, norm: Tensor) -> Tensor:  # noqa: ARG002
        return torch.ones_like(largest)

    def group_code(self, ratio: Tensor) -> Tensor:
        """Return an exponent, biased by 127: that of the largest number minus that of 6."""
        return ((ratio.view(torch.int32) >> 23).clamp(min=3) - 2).to(torch.uint8)

    def group_scales(self) -> Tensor:
        return (torch.arange(256, dtype=torch.int32) << 23).view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class _Nvfp4(BlockFloat):
    def scale(self, largest: Tensor, norm: Tensor) -> Tensor:  # noqa: ARG002
        return largest / (self.largest * E4M3.largest)

    def group_code(self, ratio: Tensor) -> Tensor:
        return E4M3.code(ratio * torch.tensor(self.largest).reciprocal())

    def group_scales(self) -> Tensor:
        return E4M3.numbers()


E4M3 = BlockFloat(codes="E4M3", bits=8, mantissa=3, bias=7, largest=448.0)
"""``torch.float8_e4m3fn``, with torch's rounding. The scale maps the largest magnitude of a block
to the largest number of the format, 448, so nothing overflows, and the whole range is used."""

E5M2 = BlockFloat(codes="E5M2", bits=8, mantissa=2, bias=15, largest=57344.0)
"""``torch.float8_e5m2`` in the same way. The largest number is 57344."""

E3M0 = BlockFloat(codes="E3M0", bits=4, mantissa=0, bias=3, largest=16.0)
"""0, 0.25, 0.5, 1, 2, 4, 8 and 16, and their negatives, rounded to nearest even. The scale maps the
largest magnitude of a block to 16. From Streaming DiLoCo."""

MXFP4 = _Mxfp4(codes="Mxfp4", bits=4, mantissa=1, bias=1, largest=6.0, group=32)
"""The numbers of e2m1, 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives, rounded to nearest even.
Each group of 32 has a power of two as its scale, so numbers above 6 scales become 6; the scale of
the block is 1. From the OCP Microscaling Formats."""

NVFP4 = _Nvfp4(codes="Nvfp4", bits=4, mantissa=1, bias=1, largest=6.0, group=16)
"""The same numbers. Each group of 16 has an e4m3 number as its scale, times the scale of the block,
which NVIDIA's format has per tensor."""


# ---------------------------------------------------------------------------------- powers of two


@dataclass(frozen=True, kw_only=True)
class _Natural(Format):
    def numbers(self) -> Tensor:
        powers = (torch.arange(128, dtype=torch.int32) << 23).view(torch.float32)
        return torch.cat([powers, -powers])

    def scale(self, largest: Tensor, norm: Tensor) -> Tensor:  # noqa: ARG002
        return (largest.view(torch.int32) + _MANTISSA & ~_MANTISSA).view(torch.float32)

    def code(self, ratio: Tensor, random: "BlockRandom") -> Tensor:
        bits = ratio.view(torch.int32)
        carried = (random.bits() & _MANTISSA) + (bits & 0x7FFFFFFF)
        return (carried >> 23 | bits >> 24 & 0x80).to(torch.uint8)


NATURAL = _Natural(codes="Natural", bits=8, is_stochastic=True)
"""A sign and a power of two, with unbiased stochastic rounding. The scale is the smallest power of
two that is not below the largest magnitude of the block. Codes stand for the 127 powers of two from
1 downwards, and for zero."""

FORMATS = {name.lower(): each for name, each in globals().items() if isinstance(each, Format)}
"""The formats above, by name. Those below have options."""


# ---------------------------------------------------------------------------- integers and signs


@dataclass(frozen=True, kw_only=True)
class _Levels(Format):
    @property
    def _lowest(self) -> int:
        return -self.levels - (self.norm == Norm.SIGNED)

    def numbers(self) -> Tensor:
        half = 2 ** (self.bits - 1)
        return torch.arange(-half, half, dtype=torch.float32).roll(half)

    def scale(self, largest: Tensor, norm: Tensor) -> Tensor:
        if self.norm == Norm.SIGNED:
            return norm / self._lowest
        if self.norm == Norm.ROOT_MEAN:
            norm = torch.minimum(norm * self.clip, largest)
        return (largest if self.norm == Norm.LARGEST else norm).div(self.levels)

    def code(self, ratio: Tensor, random: "BlockRandom") -> Tensor:
        wanted = ratio.clamp(self._lowest, self.levels)
        found = wanted.round()  # ties to even
        if self.is_stochastic:
            # Take the level below, or the next one with the probability that makes the mean exact.
            found -= (found > wanted).float()
            found += (random.uniform() < wanted - found).float()
        return found.to(torch.int8).view(torch.uint8).bitwise_and_(2**self.bits - 1)


def integers(
    bits: Literal[2, 4, 8],
    levels: int | None = None,
    *,
    norm: Literal["max", "signed_max", "l2"] = "max",
    clip: float = math.inf,
    stochastic: bool = False,
) -> Format:
    """Return the format of integers from ``-levels`` to ``levels``, by default all of ``bits``.

    The scale is the norm of the block divided by ``levels``, where the norm is the largest
    magnitude ("max") or the Euclidean norm ("l2"). With "max", numbers beyond ``clip`` root mean
    squares of the block are clamped, which makes the scale smaller. Rounding is to the nearest
    level, ties to even, or ``stochastic``: to one of the two neighboring levels, so that the
    expected value is the (clamped) number.

    With "signed_max" there is one more level, ``-levels - 1``. The scale has a sign, so that the
    number of the largest magnitude (the positive one, if there are both) is exactly this level
    times the scale. Numbers of the other sign are clamped.
    """
    most = 2 ** (bits - 1) - 1
    levels = most if levels is None else levels
    if not 1 <= levels <= most:
        raise ValueError(f"expected 1 to {most} levels in {bits} bits, found {levels}")
    norms = {"max": Norm.LARGEST, "signed_max": Norm.SIGNED, "l2": Norm.EUCLIDEAN}
    kind = Norm.ROOT_MEAN if norm == "max" and math.isfinite(clip) else norms[norm]
    codes = f"Levels<{bits}, {str(stochastic).lower()}>"
    return _Levels(
        codes=codes, bits=bits, norm=kind, levels=levels, clip=clip, is_stochastic=stochastic
    )


@dataclass(frozen=True, kw_only=True)
class _Sign(Format):
    def numbers(self) -> Tensor:
        return torch.tensor([1.0, -1.0])

    def scale(self, largest: Tensor, norm: Tensor) -> Tensor:  # noqa: ARG002
        return norm

    def code(self, ratio: Tensor, random: "BlockRandom") -> Tensor:
        codes = ratio.signbit()
        is_zero = ratio == 0
        if is_zero.any():
            codes = torch.where(is_zero, random.coins().bool(), codes)
        return codes.to(torch.uint8)


def signs(norm: Literal["mean", "root_mean"], *, majority: bool = False) -> Format:
    """Return the format of signs, times the mean magnitude of the block or its root mean square.

    Zeros get random signs. With ``majority``, messages of several ranks are not averaged; they
    vote: a number is decoded to the majority's sign times the mean of the scales, and to zero on a
    tie. A block of zeros does not vote.
    """
    return _Sign(codes="Sign", bits=1, norm=Norm[norm.upper()], is_vote=majority)
