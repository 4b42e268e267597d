"""Evenly spaced levels: integers times the scale of the block."""

import math
from typing import Literal

from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels, Norm
from reducer import _C

__all__ = ["Levels"]


class Levels(BlockCodec):
    """The integers from ``-levels`` to ``levels``, in ``bits`` of 2, 4 or 8.

    The scale is the norm of the block, divided by ``levels``: its largest number, or its Euclidean
    norm. Numbers beyond ``clip`` root mean squares of the block are cut off there, so that the
    scale is smaller; only with the norm "max". Rounding is to the nearest level, ties to even, or
    ``stochastic``: to one of the two levels around a number, such that the mean over many is the
    number itself, unless it is clipped.
    """

    def __init__(
        self,
        bits: int,
        levels: int | None = None,
        *,
        norm: Literal["max", "l2"] = "max",
        clip: float = math.inf,
        stochastic: bool = False,
        block_size: int,
    ) -> None:
        levels = 2 ** (bits - 1) - 1 if levels is None else levels
        loops = _C.level_codec(bits, levels, norm, clip, stochastic, block_size)
        unclipped = Norm.LARGEST if norm == "max" else Norm.EUCLIDEAN
        is_clipped = norm == "max" and math.isfinite(clip)
        gpu = BlockKernels(
            f"Levels<{bits}, {str(stochastic).lower()}>",
            f"Levels<{bits}, false>",
            bits,
            block_size,
            norm=Norm.ROOT_MEAN if is_clipped else unclipped,
            levels=levels,
            clip=clip,
        )
        super().__init__(loops, gpu)
