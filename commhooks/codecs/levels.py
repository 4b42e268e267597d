"""Evenly spaced levels: integers times the scale of their block."""

import math
from typing import Literal

from commhooks import _C
from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels, Norm

__all__ = ["LevelCodec"]


class LevelCodec(BlockCodec):
    """Encode as integers from ``-levels`` to ``levels`` in 2, 4 or 8 ``bits``.

    The scale is the norm of the block divided by ``levels``, where the norm is the largest
    magnitude ("max") or the Euclidean norm ("l2"). With "max", numbers beyond ``clip`` root mean
    squares of the block are clamped, which makes the scale smaller. Rounding is to the nearest
    level, ties to even, or ``stochastic``: to one of the two neighboring levels, so that the
    expected value is the (clamped) number.

    With "signed_max" there is one more level, ``-levels - 1``. The scale has a sign, so that the
    number of the largest magnitude (the positive one, if there are both) is exactly this level
    times the scale. Numbers of the other sign are clamped.
    """

    def __init__(
        self,
        bits: int,
        levels: int | None = None,
        *,
        norm: Literal["max", "signed_max", "l2"] = "max",
        clip: float = math.inf,
        stochastic: bool = False,
        block_size: int,
    ) -> None:
        levels = 2 ** (bits - 1) - 1 if levels is None else levels
        loops = _C.level_codec(bits, levels, norm, clip, stochastic, block_size)
        if norm == "max":
            kernel_norm = Norm.ROOT_MEAN if math.isfinite(clip) else Norm.LARGEST
        else:
            kernel_norm = Norm.EUCLIDEAN if norm == "l2" else Norm.SIGNED
        gpu = BlockKernels(
            f"Levels<{bits}, {str(stochastic).lower()}>",
            f"Levels<{bits}, false>",
            bits,
            block_size,
            norm=kernel_norm,
            levels=levels,
            clip=clip,
        )
        super().__init__(loops, gpu)
