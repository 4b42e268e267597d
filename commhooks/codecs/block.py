"""The codec: numbers to messages of a few bits per number, and back."""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from commhooks import native
from commhooks.codecs.formats import Format
from commhooks.errors import CommHookError
from commhooks.hook.options import Limits
from commhooks.kernels import kernel_backend_of, launch
from commhooks.kernels.launcher import THREADS, Argument, blocks_for
from commhooks.kernels.source import BLOCK_CODEC, ROTATION, TYPES, kernel_name

BlockSize = Annotated[int, Limits(ge=32, le=4096, multiple_of=32)]
"""Numbers per scale."""

_DTYPES = (torch.float32, torch.float64)
_ROTATION = 128  # as in kernels/codecs/rotation.h


class BlockCodec:
    """Encode numbers into messages whose length depends only on how many numbers there are.

    A message holds one float32 scale per ``block_size`` numbers; if the format has groups, a byte
    for each and zeros up to a multiple of 4 bytes; then the codes, and zeros up to a multiple of 4
    bytes. A decoded number is the value of its code times its scales, bit for bit the same on every
    machine. If a number of a block is not finite, or so large that sums might overflow, then the
    scale is NaN and the message is not finite. A block in which all magnitudes are below 2^-100 is
    decoded to zeros.

    With ``rotated``, every 128 numbers of a part are rotated before they are encoded, and back
    after they are decoded: see :func:`rotate`. Messages are as long as without. Encoding takes one
    more pass over the memory, and another one for the residual; decoding takes one more.

    All methods take these tensors, on one device::

        values    (numel,)         float32 or float64, contiguous
        error     (numel,)         the dtype of values
        messages  (count, bytes)   uint8, contiguous, encoded_bytes(part_length) each

    Values are split into parts of ``part_length``, one message each. The last parts may have fewer
    values, or none. Messages of CPU and CUDA tensors are identical. On a GPU, messages must be
    aligned to 4 bytes, and all work is queued on torch's current stream without synchronizing.
    """

    def __init__(self, number_format: Format, block_size: int, *, rotated: bool = False) -> None:
        # So the codes of a block, and the scales of its groups, fill whole words.
        multiple = 128 if number_format.group else 32
        if block_size % multiple or not 0 < block_size <= 4096:
            raise CommHookError(
                f"expected block_size to be a multiple of {multiple} up to 4096, found {block_size}"
            )
        self._format = number_format
        self._block_size = block_size
        self._loops = native.CpuBlockCodec(number_format, block_size)
        self._rotated = rotated

    def __reduce__(self) -> tuple[Any, ...]:  # hooks are copied and pickled with their codecs
        return partial(BlockCodec, rotated=self._rotated), (self._format, self._block_size)

    def encoded_bytes(self, part_length: int) -> int:
        """Return the length of a message.

        It is 4·⌈n / block_size⌉ + 4·⌈n / (4·group)⌉ + 4·⌈n·bits / 32⌉ for n = ``part_length``,
        without the second term if there are no groups.
        """
        bits = part_length * self._format.bits
        words = -(-part_length // self._block_size) + -(-bits // 32)
        if self._format.group:
            words += -(-part_length // (4 * self._format.group))
        return 4 * words

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
        self._check(values, messages, part_length, error)
        if self._rotated:
            rotate(values, part_length, added=error)
            error = None
        if kernel_backend_of(values) is None:
            self._loops.encode(values, messages, part_length, error, seed, keep_residual)
        else:
            own = self._format
            options = (int(own.norm), float(own.levels), float(own.clip))
            sent = (error, messages, messages.size(1), seed, keep_residual)
            self._launch("encode", own.codes, values, part_length, len(messages), *sent, *options)
        if self._rotated and keep_residual:
            rotate(values, part_length, inverse=True)

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """Write the mean of ``messages``, all of the same part, to ``values``.

        The mean is summed in float32, in one pass over the memory for all messages.
        """
        if len(messages) == 0 or values.numel() > part_length:
            raise CommHookError(
                f"expected messages for one part of at most {part_length} values, found "
                f"{len(messages)} messages and {values.numel()} values"
            )
        self._check(values, messages, part_length)
        if kernel_backend_of(values) is None:
            self._loops.average(messages, values, part_length)
        else:
            self._launch_decode(values, part_length, messages, len(messages))
        if self._rotated:
            rotate(values, part_length, inverse=True)

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, *, kept: Tensor | None = None
    ) -> Tensor:
        """Decode one message per part to ``values``, and copy the previous values to ``kept``.

        If a message is not finite, then all ``values`` become NaN and ``kept`` does not change.
        One pass over the scales, then one over the memory.

        Returns:
            Whether all messages are finite: ``(1,)``, bool, on the device.
        """
        self._check(values, messages, part_length, kept)
        if kernel_backend_of(values) is None:
            finite = torch.tensor([self._loops.assemble(messages, values, part_length, kept)])
        else:
            finite = torch.ones(1, dtype=torch.bool, device=values.device)
            blocks = blocks_for(part_length, self._block_size)
            launch(
                BLOCK_CODEC,
                kernel_name("find_not_finite"),
                (messages, messages.size(1), blocks, finite),
                grid=(blocks_for(blocks), len(messages), 1),
            )
            self._launch_decode(values, part_length, messages, 1, kept, finite)
        if self._rotated:
            rotate(values, part_length, inverse=True)
        return finite

    def _check(
        self, values: Tensor, messages: Tensor, part_length: int, other: Tensor | None = None
    ) -> None:
        """Raise CommHookError unless the tensors fit. What is called here relies on it."""
        check_numbers(values, other)
        expected = self.encoded_bytes(part_length)
        is_aligned = kernel_backend_of(messages) is None or messages.data_ptr() % 4 == 0
        if (
            messages.dtype != torch.uint8
            or messages.device != values.device
            or messages.dim() != 2
            or messages.size(1) != expected
            or not (messages.is_contiguous() and is_aligned)
            or values.numel() > len(messages) * part_length
        ):
            raise CommHookError(
                f"expected messages of uint8 on {values.device}, in contiguous rows of {expected} "
                f"bytes for {part_length} of the {values.numel()} values each, on a GPU aligned to "
                f"4 bytes; found shape {tuple(messages.shape)} of {messages.dtype} on "
                f"{messages.device} at {messages.data_ptr():#x}"
            )

    def _launch_decode(
        self,
        values: Tensor,
        part_length: int,
        messages: Tensor,
        count: int,
        kept: Tensor | None = None,
        finite: Tensor | None = None,
    ) -> None:
        """Decode the mean of each ``count`` messages."""
        codes = self._format.codes.replace("true", "false")  # decoding does not depend on rounding
        received = (messages, count, messages.size(1), kept, finite, self._format.is_vote)
        parts = len(messages) // count
        self._launch("decode", codes, values, part_length, parts, *received)

    def _launch(
        self,
        kernel: str,
        codes: str,
        values: Tensor,
        part_length: int,
        parts: int,
        *others: Argument,
    ) -> None:
        """Launch a kernel for ``codes`` with ``values``, their ``Partition`` and other arguments.

        See Note [Teams] in kernels/block_codec.cu.
        """
        size = self._block_size
        blocks = blocks_for(part_length, size)
        lane_bits = min(5, (size // 16 - 1).bit_length())
        is_wide = size > 512
        launch(
            BLOCK_CODEC,
            kernel_name(kernel, codes, TYPES[values.dtype]),
            (values, values.numel(), part_length, blocks, size, lane_bits, *others),
            grid=(blocks if is_wide else blocks_for(blocks, THREADS >> lane_bits), parts, 1),
            block=32 * blocks_for(size, 512) if is_wide else THREADS,
        )


def rotate(
    values: Tensor, part_length: int, *, added: Tensor | None = None, inverse: bool = False
) -> None:
    """Rotate every 128 numbers of each part of ``values + added`` in place, or rotate them back.

    A large number makes the scale of its block large, and all others inexact. The rotation, random
    signs and then a Hadamard matrix, spreads it over the block: Note [Rotation] in
    kernels/codecs/rotation.h. It is the same in every step, and has the same bits on every machine.

    Croci et al.: QuaRot, NeurIPS 2024, https://arxiv.org/abs/2404.00456; for gradients Jia et al.:
    SDP4Bit, NeurIPS 2024, https://arxiv.org/abs/2410.15526.
    """
    check_numbers(values, added)
    if values.numel() == 0:
        return
    if part_length < 1:
        raise CommHookError(f"expected parts of at least one number, found {part_length}")
    if kernel_backend_of(values) is None:
        native.rotate(values, added, part_length, inverse)
        return
    numel, blocks = values.numel(), blocks_for(part_length, _ROTATION)
    launch(
        ROTATION,
        kernel_name("rotate", TYPES[values.dtype]),
        (values, added, numel, part_length, blocks, inverse),
        grid=(blocks_for(blocks, THREADS // 32), blocks_for(numel, part_length), 1),
    )


def check_numbers(numbers: Tensor, *others: Tensor | None) -> None:
    """Raise CommHookError unless ``numbers`` are flat float32 or float64, and ``others`` like them.

    Compiled functions, kernels and their replacements rely on it.
    """
    if numbers.dtype not in _DTYPES or numbers.dim() != 1 or not numbers.is_contiguous():
        raise CommHookError(
            "expected numbers to be flat and contiguous, in float32 or float64, found shape "
            f"{tuple(numbers.shape)} with strides {numbers.stride()} in {numbers.dtype}"
        )
    for each in others:
        if each is not None and not (
            each.shape == numbers.shape
            and each.dtype == numbers.dtype
            and each.device == numbers.device
            and each.is_contiguous()
        ):
            raise CommHookError(
                f"expected errors like the numbers, {tuple(numbers.shape)} in {numbers.dtype} on "
                f"{numbers.device}, found {tuple(each.shape)} with strides {each.stride()} in "
                f"{each.dtype} on {each.device}"
            )
