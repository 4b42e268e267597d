"""One bit per number: its sign, times the scale of its block."""

from typing import Literal

from commhooks import _C
from commhooks.codecs.block import BlockCodec
from commhooks.kernels.block_codec import BlockKernels, Norm

__all__ = ["SignCodec"]


class SignCodec(BlockCodec):
    """Encode as signs, with the mean magnitude of the block or its root mean square as the scale.

    Zeros get random signs. With ``majority``, messages of several ranks are not averaged; they
    vote: a number is decoded to the majority's sign times the mean of the scales, and to zero on a
    tie. A block of zeros does not vote.
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
