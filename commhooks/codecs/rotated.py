"""A codec of rotated numbers, for blocks with a few much larger numbers."""

import torch
from torch import Tensor

from commhooks import _C
from commhooks.codecs.block import BlockCodec
from commhooks.kernels import backend_of, rotation

__all__ = ["RotatedCodec"]


class RotatedCodec(BlockCodec):
    """Encode with another codec, after a random rotation of every 128 numbers, and rotate back.

    A large number makes the scale of its block large, and all others inexact. The rotation, random
    signs and then a Hadamard matrix, spreads it over the block: Note [Rotation] in
    kernels/codecs/rotation.h. It is the same in every step, and has the same bits on every machine.
    Messages are as long as those of the codec. Encoding takes one more pass over the memory, and
    another one for the residual; decoding takes one more.

    Croci et al.: QuaRot, NeurIPS 2024, https://arxiv.org/abs/2404.00456; for gradients Jia et al.:
    SDP4Bit, NeurIPS 2024, https://arxiv.org/abs/2410.15526.
    """

    def __init__(self, codec: BlockCodec) -> None:
        self._codec = codec

    def require(self, device: torch.device) -> None:
        self._codec.require(device)

    def encoded_bytes(self, part_length: int) -> int:
        return self._codec.encoded_bytes(part_length)

    def encode(
        self,
        values: Tensor,
        messages: Tensor,
        part_length: int,
        *,
        error: Tensor | None = None,
        seed: int = 0,
        keep_residual: bool = False,
    ) -> None:
        _rotate(values, part_length, added=error)
        self._codec.encode(values, messages, part_length, seed=seed, keep_residual=keep_residual)
        if keep_residual:
            _rotate(values, part_length, inverse=True)

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        self._codec.average(messages, values, part_length)
        _rotate(values, part_length, inverse=True)

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, *, kept: Tensor | None = None
    ) -> Tensor:
        all_finite = self._codec.assemble(messages, values, part_length, kept=kept)
        _rotate(values, part_length, inverse=True)
        return all_finite


def _rotate(
    values: Tensor, part_length: int, *, added: Tensor | None = None, inverse: bool = False
) -> None:
    """Rotate ``values + added`` in place, or rotate back."""
    rotate = _C.rotate if backend_of(values) is None else rotation.rotate
    rotate(values, added, part_length, inverse)
