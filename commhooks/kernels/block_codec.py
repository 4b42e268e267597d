"""Encode and decode blocks of codes on a GPU, with the same bytes as the C++ loops on a CPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from commhooks.kernels.launcher import launch
from commhooks.kernels.source import TYPES, Source

_ENCODERS = (
    *(f"Levels<{bits}, {stochastic}>" for bits in (2, 4, 8) for stochastic in ("false", "true")),
    *("E4M3", "E5M2", "E3M0", "Mxfp4", "Nvfp4", "Natural", "Sign"),
)
_DECODERS = tuple(codec for codec in _ENCODERS if "true" not in codec)

SOURCE = Source(
    "block_codec.cu",
    (
        *(f"encode<{codec}, {number}>" for codec in _ENCODERS for number in TYPES.values()),
        *(f"decode<{codec}, {number}>" for codec in _DECODERS for number in TYPES.values()),
        "find_not_finite",
    ),
)


class Norm(IntEnum):
    """The norm of a block that a codec needs for the scale, as in codecs/block.h."""

    LARGEST = 0
    SIGNED = 1
    MEAN = 2
    ROOT_MEAN = 3
    EUCLIDEAN = 4


@dataclass(frozen=True)
class Format:
    """How the numbers of a block become codes: see codecs/formats.py.

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


@dataclass(frozen=True)
class BlockKernels:
    """The kernels of one codec. Everything is queued on torch's current stream, without waiting.

    :class:`BlockCodec` checks the arguments.
    """

    format: Format
    block_size: int

    def encode(
        self,
        values: Tensor,
        messages: Tensor,
        part_length: int,
        error: Tensor | None,
        seed: int,
        keep_residual: bool,
    ) -> None:
        """Encode all parts in one launch, which reads and writes the memory once."""
        parts, message_bytes = messages.shape
        partition, grid, block = self._geometry(values.numel(), part_length, parts)
        launch(
            SOURCE,
            f"encode<{self.format.codes}, {TYPES[values.dtype]}>",
            (values, error, messages, message_bytes, *partition, seed, keep_residual,
             int(self.format.norm), float(self.format.levels), float(self.format.clip)),
            grid=grid,
            block=block,
        )  # fmt: skip

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """Average all messages in one launch."""
        self._decode(messages, messages.shape[0], values, part_length, None, None)

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, kept: Tensor | None
    ) -> Tensor:
        """Assemble all parts in two launches; the first one reads only the scales."""
        finite = torch.ones(1, dtype=torch.bool, device=values.device)
        blocks = -(-part_length // self.block_size)
        parts, message_bytes = messages.shape
        launch(
            SOURCE,
            "find_not_finite",
            (messages, message_bytes, blocks, finite),
            grid=(-(-blocks // 256), parts, 1),
            block=256,
        )
        self._decode(messages, 1, values, part_length, kept, finite)
        return finite

    def _decode(
        self,
        messages: Tensor,
        count: int,
        values: Tensor,
        part_length: int,
        kept: Tensor | None,
        finite: Tensor | None,
    ) -> None:
        parts, message_bytes = messages.shape
        partition, grid, block = self._geometry(values.numel(), part_length, parts // count)
        launch(
            SOURCE,
            f"decode<{self.format.codes.replace('true', 'false')}, {TYPES[values.dtype]}>",
            (messages, count, message_bytes, values, kept, finite, *partition, self.format.is_vote),
            grid=grid,
            block=block,
        )

    def _geometry(
        self, numel: int, part_length: int, parts: int
    ) -> tuple[Sequence[int], tuple[int, int, int], int]:
        """Return the ``Partition``, the grid, and the threads of a block. See Note [Teams]."""
        blocks = -(-part_length // self.block_size)
        lane_bits = min(5, (self.block_size // 16 - 1).bit_length())
        partition = (numel, part_length, blocks, self.block_size, lane_bits)
        if self.block_size > 512:
            return partition, (blocks, parts, 1), 32 * -(-self.block_size // 512)
        teams = 256 >> lane_bits
        return partition, (-(-blocks // teams), parts, 1), 256
