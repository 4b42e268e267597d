"""The base class of codecs, which encode numbers in blocks that have one scale each."""

from typing import Annotated

import torch
from torch import Tensor

from commhooks import _C, kernels
from commhooks.hook.options import Ge, Le, MultipleOf
from commhooks.kernels.block_codec import BlockKernels

__all__ = ["BlockCodec", "BlockSize"]

BlockSize = Annotated[int, Ge(32), Le(4096), MultipleOf(32)]
"""How many numbers share a scale."""


class BlockCodec:
    """Encode numbers into messages whose length depends only on how many numbers there are.

    A message holds one float32 scale per block, then the codes, then zeros up to a multiple of 4
    bytes. A decoded number is the value of its code times the scale of its block, bit for bit the
    same on every machine. If a number of a block is not finite, or so large that sums might
    overflow, then the scale is NaN and the message is not finite. A block in which all magnitudes
    are below 2^-100 is decoded to zeros.

    All methods take these tensors, on one device::

        values    (numel,)         float32 or float64, contiguous
        error     (numel,)         the dtype of values
        messages  (count, bytes)   uint8, contiguous, encoded_bytes(part_length) each

    Values are split into parts of ``part_length``, one message each. The last parts may have fewer
    values, or none. ``loops`` process CPU tensors and ``gpu`` processes CUDA tensors, with
    identical messages. On a GPU, messages must be aligned to 4 bytes, and all work is queued on
    torch's current stream without synchronizing.
    """

    def __init__(self, loops: _C.CpuBlockCodec, gpu: BlockKernels) -> None:
        self._loops = loops
        self._gpu = gpu

    def require(self, device: torch.device) -> None:
        """Raise CommHookError, which says what to install, if ``device`` cannot run the kernels."""
        kernels.require(device)

    def encoded_bytes(self, part_length: int) -> int:
        """Return 4·⌈part_length / block_size⌉ + 4·⌈part_length · bits / 32⌉, a message's length."""
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
        """Write the messages of the parts of ``values + error``, in one pass over the memory.

        With ``keep_residual``, ``values`` become ``values + error`` minus the decoded messages.
        Without it, codecs may use their memory for other numbers. Random numbers depend only on
        ``seed`` (64 bits) and on the position.
        """
        self._backend(values).encode(values, messages, part_length, error, seed, keep_residual)

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """Write the mean of ``messages``, all of the same part, to ``values``.

        The mean is summed in float32, in one pass over the memory for all messages.
        """
        self._backend(values).average(messages, values, part_length)

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, *, kept: Tensor | None = None
    ) -> Tensor:
        """Decode one message per part to ``values``, and copy the previous values to ``kept``.

        If a message is not finite, then all ``values`` become NaN and ``kept`` does not change.
        One pass over the scales, then one over the memory.

        Returns:
            Whether all messages are finite: ``(1,)``, bool, on the device.
        """
        finite = self._backend(values).assemble(messages, values, part_length, kept)
        return finite if isinstance(finite, Tensor) else torch.tensor([finite])

    def _backend(self, values: Tensor) -> _C.CpuBlockCodec | BlockKernels:
        return self._loops if kernels.backend_of(values) is None else self._gpu
