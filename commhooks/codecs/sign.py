"""One bit per number."""

from typing import Literal

from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels, Norm
from reducer import _C

__all__ = ["Sign"]


class Sign(BlockCodec):
    """The sign of each number; the scale is the mean size of the block's, or its root mean square.

    Zeros have random signs. With ``majority``, several messages are not averaged but vote: they are
    decoded to the sign that most of them have, times their mean scale, and to zero where they are
    in balance; a block of zeros has no vote.
    """

    def __init__(
        self, norm: Literal["mean", "root_mean"], *, majority: bool = False, block_size: int
    ) -> None:
        gpu = BlockKernels(
            "Sign",
            "Sign",
            1,
            block_size,
            norm=Norm.MEAN if norm == "mean" else Norm.ROOT_MEAN,
            is_vote=majority,
        )
        super().__init__(_C.sign_codec(norm, majority, block_size), gpu)
