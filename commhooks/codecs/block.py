"""Codecs that cut numbers into blocks, each with one scale; compiled kernels do the work."""

from typing import Annotated

import torch
from torch import Tensor

from commhooks import kernels
from commhooks.codecs.codec import Codec
from commhooks.hook.options.constraints import Ge, Le, MultipleOf
from commhooks.kernels.block_codec import BlockKernels
from reducer import _C

__all__ = ["BlockCodec", "BlockSize"]

BlockSize = Annotated[int, Ge(32), Le(4096), MultipleOf(32)]
"""Numbers that share a scale."""


class BlockCodec(Codec):
    """A message is one float32 scale per block, the codes, and zeros to a multiple of 4 bytes.

    A number is decoded to its code's value times the scale of its block, which depends on the
    block alone. A scale that is not finite marks a block that was not. Blocks whose numbers are all
    below 2^-100 in size are decoded to zeros.

    CPU tensors are for ``loops``, CUDA tensors for ``gpu``, whose messages are the same. On a GPU
    messages start at a multiple of 4 bytes.
    """

    def __init__(self, loops: _C.BlockCodec, gpu: BlockKernels) -> None:
        self._loops = loops
        self._gpu = gpu

    def require(self, device: torch.device) -> None:
        """See :class:`Codec`."""
        kernels.require(device)

    def encoded_bytes(self, part_length: int) -> int:
        """4·⌈part_length / block_size⌉ + 4·⌈part_length · bits / 32⌉."""
        return self._loops.encoded_bytes(part_length)

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
        """See :class:`Codec`. One pass over the memory."""
        self._for(values).encode(values, messages, part_length, error, seed, keep_residual)

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """See :class:`Codec`. One pass over the memory, for all messages."""
        self._for(values).average(messages, values, part_length)

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, *, kept: Tensor | None = None
    ) -> Tensor:
        """See :class:`Codec`. One pass over the scales, then one over the memory."""
        finite = self._for(values).assemble(messages, values, part_length, kept)
        return finite if isinstance(finite, Tensor) else torch.tensor([finite])

    def _for(self, values: Tensor) -> _C.BlockCodec | BlockKernels:
        return self._loops if kernels.backend_of(values) is None else self._gpu
