"""Codecs that cut numbers into blocks, each with one scale; compiled kernels do the work."""

from typing import Annotated

from annotated_types import Ge, Le, MultipleOf
from torch import Tensor

from commhooks.codecs.codec import Codec
from reducer import _C

__all__ = ["BlockCodec", "BlockSize"]

BlockSize = Annotated[int, Ge(32), Le(4096), MultipleOf(32)]
"""Numbers that share a scale."""


class BlockCodec(Codec):
    """A message is one float32 scale per block, the codes, and zeros to a multiple of 4 bytes.

    A number is decoded to its code's value times the scale of its block, which depends on the
    block alone. A scale that is not finite marks a block that was not. Blocks whose numbers are all
    below 2^-100 in size are decoded to zeros. CPU only.
    """

    def __init__(self, kernels: _C.BlockCodec) -> None:
        self._kernels = kernels

    def encoded_bytes(self, numel: int) -> int:
        """4·⌈numel / block_size⌉ + 4·⌈numel · bits / 32⌉."""
        return self._kernels.encoded_bytes(numel)

    def encode(
        self,
        values: Tensor,
        message: Tensor,
        *,
        error: Tensor | None = None,
        seed: int = 0,
        keep_residual: bool = False,
    ) -> None:
        """See :class:`Codec`. One pass over the memory."""
        self._kernels.encode(values, message, error, seed, keep_residual)

    def decode(self, messages: Tensor, values: Tensor, *, kept: Tensor | None = None) -> None:
        """See :class:`Codec`. One pass over the memory, for all messages."""
        self._kernels.decode(messages, values, kept)

    def is_finite(self, messages: Tensor, numel: int) -> bool:
        """See :class:`Codec`. Reads the scales only."""
        return self._kernels.is_finite(messages, numel)
