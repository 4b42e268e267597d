"""The block codec: tensors of numbers to messages and back. See csrc/codecs/block_codec.h."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commhooks.pure.block_scales import find_scales
from commhooks.pure.codes import (
    E3M0,
    E4M3,
    E5M2,
    BlockFloat,
    Codes,
    GroupCodes,
    Levels,
    Mxfp4,
    Natural,
    Norm,
    Nvfp4,
    Sign,
)
from commhooks.pure.random import BlockRandom, Floats
from commhooks.pure.requirements import require
from commhooks.pure.slowness import warn_once

__all__ = ["CpuBlockCodec", "fp4_codec", "fp8_codec", "level_codec", "natural_codec", "sign_codec"]

_MOST_NUMBERS = 1 << 14  # at a time: what is computed from them stays in caches and in the heap
_BLOCK_MULTIPLE = 32
_GROUPED_MULTIPLE = 128
_MAX_BLOCK_SIZE = 4096

Array = npt.NDArray[np.floating]
Bytes = npt.NDArray[np.uint8]


class CpuBlockCodec:
    """Encodes numbers as blocks of codes with one float32 scale each."""

    def __init__(self, codes: Codes, block_size: int, *, is_vote: bool = False) -> None:
        multiple = _GROUPED_MULTIPLE if isinstance(codes, GroupCodes) else _BLOCK_MULTIPLE
        require(
            0 < block_size <= _MAX_BLOCK_SIZE and block_size % multiple == 0,
            f"Expected block_size to be a multiple of {multiple} up to {_MAX_BLOCK_SIZE}, "
            f"found {block_size}.",
        )
        self._codes = codes
        self._block_size = block_size
        self._is_vote = is_vote
        every = np.arange(2**codes.bits, dtype=np.uint32)
        self._values = codes.decode(every)
        bytes_ = np.arange(256, dtype=np.uint8)
        # Row i has the numbers of the codes in byte i.
        self._values_of_byte = self._values[_unpacked(bytes_, codes.bits)]

    def encoded_bytes(self, part_length: int) -> int:
        """Return the length of the message of a part."""
        require(part_length >= 0, f"Expected part_length to be at least 0, found {part_length}.")
        return self._codes_offset(part_length, 0) - 4 * (-part_length * self._codes.bits // 32)

    def encode(
        self,
        values: Tensor,
        messages: Tensor,
        part_length: int,
        error: Tensor | None,
        seed: int,
        keep_residual: bool,
    ) -> None:
        """Write the messages of values + error; with ``keep_residual`` the residual to values."""
        self._check(values, messages, part_length, error, "error")
        warn_once()
        numbers, errors = _array(values), None if error is None else _array(error)
        with np.errstate(all="ignore"):
            for part, message in enumerate(messages.numpy()):
                whole = slice(part * part_length, (part + 1) * part_length)
                for first, tile in self._tiles(whole, numbers.size):
                    y = numbers[tile] if errors is None else numbers[tile] + errors[tile]
                    block = (first - whole.start) // self._block_size
                    codes, scales = self._encode_tile(y, message, part_length, block, seed, first)
                    if keep_residual:
                        decoded = self._values.take(codes, mode="wrap") * scales
                        rest = decoded.ravel()[: y.size]
                        np.subtract(y, rest, out=numbers[tile], dtype=y.dtype)

    def average(self, messages: Tensor, values: Tensor, part_length: int) -> None:
        """Write the mean of the messages to values."""
        self._check(values, messages, part_length)
        require(
            len(messages) > 0 and values.numel() <= part_length,
            f"Expected messages for one part of at most {part_length} elements, found "
            f"{len(messages)} messages and {values.numel()} elements.",
        )
        warn_once()
        self._decode(list(messages.numpy()), _array(values), part_length)

    def assemble(
        self, messages: Tensor, values: Tensor, part_length: int, kept: Tensor | None
    ) -> bool:
        """Decode the messages of all parts; return whether they are finite."""
        self._check(values, messages, part_length, kept, "kept")
        warn_once()
        scales = messages.numpy()[:, : 4 * self._blocks(part_length)]
        if not np.isfinite(np.ascontiguousarray(scales).view(np.float32)).all():
            values.fill_(math.nan)
            return False
        if kept is not None:
            kept.copy_(values)
        numbers = _array(values)
        for part, message in enumerate(messages.numpy()):
            whole = slice(part * part_length, (part + 1) * part_length)
            self._decode([message], numbers[whole], part_length)
        return True

    def _encode_tile(
        self, numbers: Array, message: Bytes, part_length: int, block: int, seed: int, first: int
    ) -> tuple[Bytes, Floats]:
        """Write and return the codes and scales of the blocks from ``block`` on.

        ``first`` is the index of the first number among all parts. What is returned has zeros for
        blocks without a scale.
        """
        size, bits = self._block_size, self._codes.bits
        blocks = min(self._blocks_at_once, self._blocks(part_length) - block)
        y = np.zeros((blocks, size), np.float32)
        y.ravel()[: numbers.size] = numbers
        counts = np.clip(numbers.size - size * np.arange(blocks), 0, size)
        scales, has_scale = find_scales(self._codes, y, counts)
        random = BlockRandom(seed, first, blocks, size)
        ratios = y * (np.float32(1) / scales)
        factors = np.where(has_scale, scales, np.float32(0))
        if isinstance(self._codes, GroupCodes):
            room = self._groups_of(self._codes, message, part_length, block)
            ratios, factors = self._encode_groups(
                self._codes, y, scales, factors, numbers.size, room
            )
        codes = self._codes.encode(ratios, random).astype(np.uint8)
        if not has_scale.all():
            codes *= has_scale
        codes.ravel()[numbers.size :] = 0
        message[4 * block : 4 * (block + blocks)] = scales.view(np.uint8).ravel()
        room = message[self._codes_offset(part_length, block) :][: blocks * size * bits // 8]
        room[:] = _packed(codes, bits)[: room.size]
        return codes, factors

    def _encode_groups(
        self, codes: GroupCodes, y: Floats, scales: Floats, factors: Floats, count: int, room: Bytes
    ) -> tuple[Floats, Floats]:
        """Write the codes of the groups of blocks to ``room``, with zeros after the last number.

        Return the numbers over the scales of their groups, and these scales, (blocks, block_size).
        """
        inverses = np.float32(1) / scales
        largest = np.abs(y).reshape(len(y), -1, codes.group).max(axis=2)
        of_groups = codes.group_codes(largest * inverses)
        of_groups[np.broadcast_to(factors == 0, of_groups.shape)] = 0
        of_groups.ravel()[-(-count // codes.group) :] = 0
        room = room[: of_groups.size]
        room[:] = of_groups.ravel()[: room.size]
        group_scales = codes.group_scales(of_groups)
        divisors = group_scales.copy()
        divisors[divisors == 0] = 1
        group_inverses = inverses / divisors
        ratios: Floats = y * group_inverses.repeat(codes.group, axis=1)
        return ratios, (group_scales * factors).repeat(codes.group, axis=1)

    def _decode(self, messages: Sequence[Bytes], values: Array, part_length: int) -> None:
        """Write the mean, or the vote, of messages of one part to values."""
        with np.errstate(all="ignore"):
            for first, tile in self._tiles(slice(0, part_length), values.size):
                if values[tile].size:
                    block = first // self._block_size
                    sums = self._sum_tile(messages, values[tile].size, part_length, block)
                    values[tile] = sums.ravel()[: values[tile].size]

    def _sum_tile(
        self, messages: Sequence[Bytes], count: int, part_length: int, block: int
    ) -> Floats:
        size, bits = self._block_size, self._codes.bits
        blocks = self._blocks(count)
        share = np.float32(1) / np.float32(len(messages))
        mean_scale = np.zeros((blocks, 1), np.float32)
        sums: Floats | None = None
        for message in messages:
            scales = message[4 * block : 4 * (block + blocks)].view(np.float32)[:, None]
            weights = scales * share
            mean_scale += weights
            if self._is_vote:
                weights = (scales != 0).astype(np.float32)
            begin = self._codes_offset(part_length, block)
            packed = np.zeros(blocks * size * bits // 8, np.uint8)
            found = message[begin : begin + packed.size]
            packed[: found.size] = found
            terms = self._values_of_byte.take(packed, axis=0, mode="wrap").reshape(blocks, size)
            if isinstance(self._codes, GroupCodes):
                weights = self._weights_of_numbers(
                    self._codes, message, weights, part_length, block
                )
            terms *= weights
            sums = terms if sums is None else np.add(sums, terms, out=sums)
        assert sums is not None
        if self._is_vote:
            sums = np.clip(sums, np.float32(-1), np.float32(1)) * mean_scale
        return sums

    def _weights_of_numbers(
        self, codes: GroupCodes, message: Bytes, weights: Floats, part_length: int, block: int
    ) -> Floats:
        groups = np.zeros(len(weights) * self._block_size // codes.group, np.uint8)
        found = self._groups_of(codes, message, part_length, block)[: groups.size]
        groups[: found.size] = found
        scales = codes.group_scales(groups.astype(np.uint32)).reshape(len(weights), -1)
        return (scales * weights).repeat(codes.group, axis=1)

    def _tiles(self, part: slice, numel: int) -> Iterator[tuple[int, slice]]:
        """Yield the index of the first number and the range of the numbers of whole blocks."""
        step = self._blocks_at_once * self._block_size
        for first in range(part.start, part.stop, step):
            yield first, slice(min(first, numel), min(first + step, part.stop, numel))

    @property
    def _blocks_at_once(self) -> int:
        return max(1, _MOST_NUMBERS // self._block_size)

    def _blocks(self, count: int) -> int:
        return -(-count // self._block_size)

    def _groups_of(self, codes: GroupCodes, message: Bytes, part_length: int, block: int) -> Bytes:
        """Return the scales of the groups from a block on."""
        begin = 4 * self._blocks(part_length) + block * self._block_size // codes.group
        return message[begin : self._codes_offset(part_length, 0)]

    def _codes_offset(self, part_length: int, block: int) -> int:
        begin = 4 * self._blocks(part_length)
        if isinstance(self._codes, GroupCodes):
            begin += 4 * -(-part_length // (4 * self._codes.group))
        return begin + block * self._block_size * self._codes.bits // 8

    def _check(
        self,
        values: Tensor,
        messages: Tensor,
        part_length: int,
        companion: Tensor | None = None,
        name: str = "",
    ) -> None:
        _check_values("values", values)
        if companion is not None:
            _check_values(name, companion)
            require(
                companion.dtype == values.dtype and companion.numel() == values.numel(),
                f"Expected {name} to have the {values.numel()} elements and the dtype "
                f"{values.dtype} of the values, found {companion.numel()} of {companion.dtype}.",
            )
        require(
            messages.device.type == "cpu" and messages.dtype == torch.uint8,
            f"Expected messages to be uint8 on the CPU, found {messages.dtype} on "
            f"{messages.device}.",
        )
        expected = self.encoded_bytes(part_length)
        require(
            messages.dim() == 2 and messages.is_contiguous() and messages.shape[1] == expected,
            f"Expected messages as contiguous rows of {expected} bytes, for {part_length} elements "
            f"each, found shape {list(messages.shape)}.",
        )
        require(
            values.numel() <= len(messages) * part_length,
            f"Expected at most {len(messages)} parts of {part_length} elements, found "
            f"{values.numel()} elements.",
        )


def level_codec(
    bits: int, levels: int, norm: str, clip: float, stochastic: bool, block_size: int
) -> CpuBlockCodec:
    """Return a codec for integers from -levels to levels."""
    require(bits in (2, 4, 8), f"Expected codes of 2, 4 or 8 bits, found {bits}.")
    most = 2 ** (bits - 1) - 1
    require(1 <= levels <= most, f"Expected 1 to {most} levels in {bits} bits, found {levels}.")
    require(
        norm in ("max", "signed_max", "l2"),
        f"Expected norm to be 'max', 'signed_max' or 'l2', found '{norm}'.",
    )
    require(clip > 0, f"Expected clip to be above 0, found {clip:g}.")
    kind = Norm.EUCLIDEAN if norm == "l2" else Norm.SIGNED
    if norm == "max":
        kind = Norm.ROOT_MEAN if math.isfinite(clip) else Norm.LARGEST
    return CpuBlockCodec(Levels(bits, levels, kind, clip, stochastic), block_size)


def fp8_codec(number_format: str, block_size: int) -> CpuBlockCodec:
    """Return a codec for 8-bit floating point: e4m3 or e5m2."""
    formats = {"e4m3": E4M3, "e5m2": E5M2}
    require(
        number_format in formats,
        f"Expected format to be 'e4m3' or 'e5m2', found '{number_format}'.",
    )
    return CpuBlockCodec(BlockFloat(formats[number_format]), block_size)


def fp4_codec(number_format: str, block_size: int) -> CpuBlockCodec:
    """Return a codec for 4-bit floating point: mxfp4 or nvfp4, with a scale per group, or e3m0."""
    formats: dict[str, Codes] = {"mxfp4": Mxfp4(), "nvfp4": Nvfp4(), "e3m0": BlockFloat(E3M0)}
    require(
        number_format in formats,
        f"Expected format to be 'mxfp4', 'nvfp4' or 'e3m0', found '{number_format}'.",
    )
    return CpuBlockCodec(formats[number_format], block_size)


def natural_codec(block_size: int) -> CpuBlockCodec:
    """Return a codec for powers of two, rounded stochastically."""
    return CpuBlockCodec(Natural(), block_size)


def sign_codec(norm: str, majority: bool, block_size: int) -> CpuBlockCodec:
    """Return a codec for signs."""
    norms = {"mean": Norm.MEAN, "root_mean": Norm.ROOT_MEAN}
    require(norm in norms, f"Expected norm to be 'mean' or 'root_mean', found '{norm}'.")
    return CpuBlockCodec(Sign(norms[norm]), block_size, is_vote=majority)


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().numpy()
    return array


def _check_values(name: str, tensor: Tensor) -> None:
    require(
        tensor.device.type == "cpu",
        f"Expected {name} on the CPU, found it on {tensor.device}: this codec has no kernels for "
        "other devices.",
    )
    require(
        tensor.dtype in (torch.float32, torch.float64),
        f"Expected {name} to be float32 or float64, found {tensor.dtype}.",
    )
    require(
        tensor.dim() == 1 and tensor.is_contiguous(),
        f"Expected {name} to be flat and contiguous, found shape {list(tensor.shape)} with strides "
        f"{list(tensor.stride())}.",
    )


def _packed(codes: Bytes, bits: int) -> Bytes:
    """Pack codes, one per byte, into ``bits`` bits each, lowest bits first."""
    if bits == 1:
        return np.packbits(codes, axis=None, bitorder="little")
    codes = codes.ravel()
    while bits < 8:
        codes = codes[::2] | codes[1::2] << np.uint8(bits)
        bits *= 2
    return codes


def _unpacked(packed: Bytes, bits: int) -> Bytes:
    """Return the codes of each byte, (bytes, 8 / bits)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Bytes = (packed[:, None] >> shifts) & np.uint8(2**bits - 1)
    return codes
