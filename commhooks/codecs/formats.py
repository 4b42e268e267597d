"""The formats in which codecs send numbers: each is declared here, once for all implementations.

The arithmetic of a format is a C++ struct in kernels/codecs/. CUDA kernels and the loops in
csrc/codecs are compiled for it, and commhooks/fallback has it in NumPy, under the same name.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class Norm(IntEnum):
    """The norm of a block that a codec needs for the scale, as in kernels/codecs/block.h."""

    LARGEST = 0
    SIGNED = 1
    MEAN = 2
    ROOT_MEAN = 3
    EUCLIDEAN = 4


@dataclass(frozen=True)
class Format:
    """The mapping from the numbers of a block to codes.

    ``codes`` is the name of a C++ struct in kernels/codecs/; ``levels`` and ``clip`` are options of
    ``Levels``. With ``is_vote``, several messages vote instead of being averaged. ``group``: how
    many numbers share a scale of one byte, or 0; then blocks are multiples of 128.
    """

    codes: str
    bits: int
    norm: Norm = Norm.LARGEST
    levels: int = 0
    clip: float = math.inf
    is_vote: bool = False
    group: int = 0


E4M3 = Format("E4M3", 8)
"""``torch.float8_e4m3fn``, with torch's rounding. The scale maps the largest magnitude of a block
to the largest number of the format, 448, so nothing overflows, and the whole range is used."""

E5M2 = Format("E5M2", 8)
"""``torch.float8_e5m2`` in the same way. The largest number is 57344."""

E3M0 = Format("E3M0", 4)
"""0, 0.25, 0.5, 1, 2, 4, 8 and 16, and their negatives, rounded to nearest even. The scale maps the
largest magnitude of a block to 16. From Streaming DiLoCo."""

MXFP4 = Format("Mxfp4", 4, group=32)
"""The numbers of e2m1, 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives, rounded to nearest even.
Each group of 32 has a power of two as its scale, so numbers above 6 scales become 6; the scale of
the block is 1. From the OCP Microscaling Formats."""

NVFP4 = Format("Nvfp4", 4, group=16)
"""The same numbers. Each group of 16 has an e4m3 number as its scale, times the scale of the block,
which NVIDIA's format has per tensor."""

NATURAL = Format("Natural", 8)
"""A sign and a power of two, with unbiased stochastic rounding. The scale is the smallest power of
two that is not below the largest magnitude of the block. Codes stand for the 127 powers of two from
1 downwards, and for zero."""


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
    return Format(codes, bits, norm=kind, levels=levels, clip=clip)


def signs(norm: Literal["mean", "root_mean"], *, majority: bool = False) -> Format:
    """Return the format of signs, times the mean magnitude of the block or its root mean square.

    Zeros get random signs. With ``majority``, messages of several ranks are not averaged; they
    vote: a number is decoded to the majority's sign times the mean of the scales, and to zero on a
    tie. A block of zeros does not vote.
    """
    return Format("Sign", 1, norm=Norm[norm.upper()], is_vote=majority)
